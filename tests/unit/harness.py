"""An EngineCore over the fake executor, with a record of what came out and the checks that hold after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_executor import SPEC, Failures, FakeExecutor

from rapid_infer.cache.manager import CacheManager
from rapid_infer.cache.prefix import HashExtra
from rapid_infer.cache.spec import CacheGroup
from rapid_infer.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from rapid_infer.engine.core import EngineCore
from rapid_infer.engine.masks import TokenMask
from rapid_infer.engine.request import Request
from rapid_infer.engine.results import Finished, StepOutputs
from rapid_infer.engine.scheduler import Scheduler
from rapid_infer.engine.step_plan import StepPlan
from rapid_infer.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def engine_config(
    *,
    max_model_len: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    enable_chunked_prefill: bool = True,
    queue_depth: int = 1,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("float32", max_model_len, False, "dummy", 0),
        cache=CacheConfig(block_size, 0.9, None, True),
        scheduler=SchedulerConfig(max_num_seqs, max_num_batched_tokens, enable_chunked_prefill, queue_depth),
        parallel=ParallelConfig(),
        device="cpu",
    )


def make_request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    stop: tuple[int, ...] = (),
    share: bytes | None = b"",
    extras: tuple[HashExtra, ...] = (),
    params: SamplingParams = GREEDY,
    sample_index: int = 0,
    mask: TokenMask | None = None,
) -> Request:
    limit = len(prompt) + max_tokens
    ids = np.array(prompt, np.int32)
    request = Request(name, ids, params, stop, limit, sample_index=sample_index, cache_salt=share, extras=extras)
    request.mask = mask
    return request


class Harness:
    """`tokens`, `ends`: per request what came out of `step`. Every step is followed by the integrity check."""

    def __init__(
        self,
        *,
        num_blocks: int | Sequence[int] = 64,
        groups: Sequence[CacheGroup] = (CacheGroup(SPEC, 1),),
        failures: Failures | None = None,
        drafts: int = 0,
        **options: Any,
    ) -> None:
        config = engine_config(**options)
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            budget=config.scheduler.max_num_batched_tokens,
            groups=groups,
            failures=failures,
            drafts=drafts,
        )
        self.core = EngineCore(config, self.executor)
        self.executor.owner_of = lambda row: self.scheduler.rows.requests[row]
        self.executor.pool_of = lambda group: self.core.cache.pool_of(group)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finished] = {}

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def cache(self) -> CacheManager:
        return self.core.cache

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    @property
    def last_plan(self) -> StepPlan:
        return self.plans[-1]

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
        request = make_request(name, prompt, max_tokens, **options)
        self.core.add_request(request)
        self.requests[name] = request
        self.tokens[name] = []
        return request

    def step(self) -> StepOutputs:
        outputs = self.core.step()
        if self.executor.violation is not None:
            raise self.executor.violation
        assert len(outputs.request_ids) == len(outputs.token_ids)
        assert self.executor.info.num_drafts or len(set(outputs.request_ids)) == len(outputs.request_ids)
        for name, token in zip(outputs.request_ids, outputs.token_ids):
            assert name not in self.ends, f"{name} got a token after its end"
            self.tokens[name].append(token)
        for finished in outputs.finished:
            assert finished.request_id not in self.ends, f"{finished.request_id} ended twice"
            self.ends[finished.request_id] = finished
        self.core.check_integrity()
        return outputs

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.core.has_unfinished_requests():
                break
            self.step()
        assert not self.core.has_unfinished_requests(), f"still running after {max_steps} steps"
        assert self.ends.keys() == self.requests.keys()
        assert self.cache.num_free == self.cache.num_usable, "blocks leaked"

    def reason(self, name: str) -> str:
        return self.ends[name].reason.value

    def lens(self, step: int = -1) -> dict[int, int]:
        """Tokens of each row in one step."""
        plan = self.plans[step]
        return dict(zip(plan.rows.tolist(), plan.query_lens.tolist()))
