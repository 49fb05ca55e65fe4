"""Runs every kind of step that a model can take, without memory: what they launch is what has to be compiled.

The same code as in the engine, on "meta": graphs are recorded by one that only runs them, and eager steps, which come
in any shape, are run in shapes of every class that kernels distinguish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rapid_infer.config import EngineConfig
from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.engine.step_plan import PromptLogprobsPlan, StepPlan
from rapid_infer.layers.stack import distinct_layers
from rapid_infer.loader.load import finalize
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.ops.registry import known_priority
from rapid_infer.worker import build
from rapid_infer.worker.device_rows import DeviceRows
from rapid_infer.worker.graph_runner import DECODE, GREEDY, GraphRunner, splits_context
from rapid_infer.worker.memory import largest_step
from rapid_infer.worker.model_runner import make_ring
from rapid_infer.worker.program import PROMPT_LOGPROBS_AT_ONCE, StepProgram, StepShape

T = TypeVar("T")

CHOICES = (GREEDY, SamplingFeatures(bias=True), SamplingFeatures(random=True))
TRUNCATIONS = (
    SamplingFeatures(random=True, truncated=True),
    SamplingFeatures(random=True, min_p=True),
    SamplingFeatures(random=True, truncated=True, min_p=True),
)
"""What makes a difference to kernels in how tokens are chosen; all else is done by torch. Truncation is launched alike
for any number of rows."""

META = torch.device("meta")


class _Rehearsal:
    """A recorder that runs what it is to record."""

    def record(self, what: str, run: Callable[[], T], warm_up: Callable[[], object] | None = None) -> tuple[Any, T]:
        return None, run()

    def release_unused(self) -> None: ...


@torch.inference_mode()
def dry_run(cls: Any, path: Path, config: EngineConfig, model_config: Any) -> None:
    """Of the model in `path`; `model_config` as in `build_model`.

    `config` may ask for providers that only the engine's process has: they have no part in it.
    """
    config = replace(config, op_priority=known_priority(config.op_priority))
    built = build.build_model(cls, read_checkpoint(path), config, META, model_config)
    finalize(built.model)
    build.allocate_caches(built.model, 1024, config.cache.block_size, META)
    steps = _Steps(built, config)
    with distinct_layers(built.model):
        if config.cuda_graphs:
            steps.run_graphs()
        steps.run_eager()


@dataclass
class _Steps:
    built: build.BuiltModel
    config: EngineConfig

    def __post_init__(self) -> None:
        scheduler, self.max_model_len = self.config.scheduler, self.config.model.max_model_len
        self.max_rows, self.max_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        model, block_size = self.built.model, self.config.cache.block_size
        groups, max_blocks = len(build.cache_groups(model)), -(-self.max_model_len // block_size)
        self.device_rows = DeviceRows(META, self.max_rows, groups, max_blocks, self.built.config.vocab_size)
        ring = make_ring(self.device_rows, self.max_tokens, block_size, scheduler.queue_depth + 1)
        self.program = StepProgram(model, self.device_rows, ring, self.built.ops, block_size)

    def run_graphs(self) -> None:
        """All that may ever be recorded."""
        graphs = GraphRunner(self.program, _Rehearsal(), max_tokens=self.max_tokens, max_model_len=self.max_model_len)
        # The largest kernels are among those of the largest step.
        for kind, size in product(graphs.kinds, reversed(graphs.token_sizes)):
            graphs.capture_forward(kind, size)
        for size in reversed(graphs.sizes):
            graphs.capture_forward(DECODE, size)
            # It makes no difference what kind of forward came before.
            for features in (*CHOICES, *(TRUNCATIONS if size in (1, self.max_rows) else ())):
                graphs.capture_sample(DECODE, size, features)

    def run_eager(self) -> None:
        """Beside recorded steps, those with prompt log-probabilities, and the one that measures memory."""
        for plan in self._eager_plans():
            arrays = [torch.from_numpy(array).to(META) for array in DeviceRows.pack_plan(plan)]
            self.device_rows.apply_plan(plan, iter(arrays))
            wanted, prompt_tokens = plan.prompt_logprobs, None
            if wanted is not None:
                prompt_tokens = torch.from_numpy(wanted.tokens).to(META).long()
            output = self.program.forward(StepShape.of(plan, counted=False), prompt_tokens)
            self.program.sample(output, plan.features)
            if wanted is not None:
                assert output.prompt_hidden is not None
                targets = torch.from_numpy(wanted.targets).to(META).long()
                self.program.prompt_logprobs(output.prompt_hidden, targets, wanted.count)

    def _eager_plans(self) -> Iterator[StepPlan]:
        yield largest_step(self.max_rows, self.max_tokens, self.max_model_len)
        for tokens in _sizes(self.max_tokens):
            for rows in dict.fromkeys((1, min(tokens, self.max_rows))):
                plan = replace(largest_step(rows, tokens, self.max_model_len), token_lists=None, features=GREEDY)
                ids = np.arange(min(plan.num_tokens, PROMPT_LOGPROBS_AT_ONCE), dtype=np.int32)
                yield replace(plan, prompt_logprobs=PromptLogprobsPlan(ids, ids, 1))
                several, longest = len(plan.rows) > 1, self.max_model_len
                if several:
                    # Rows with a context may share parts of it.
                    yield replace(plan, max_seq_len=longest)
                if splits_context(self.built.model):
                    yield replace(plan, max_context_len=0)
                if self.config.cuda_graphs:
                    continue
                yield plan
                if plan.max_query_len == 1:
                    decode = replace(plan, tokens=plan.tokens[:0])
                    for features in (*CHOICES, *TRUNCATIONS):
                        yield replace(decode, features=features)
                    if several:
                        yield replace(decode, max_seq_len=longest)


def _sizes(limit: int) -> list[int]:
    """Powers of two, where kernels choose, and numbers just above, which are odd; both kinds of the largest, too."""
    powers = [1 << power for power in range(limit.bit_length())]
    largest = {limit, limit - 1, limit // 16 * 16} - {0}
    return sorted({*powers, *(power + 1 for power in powers if power < limit), *largest})
