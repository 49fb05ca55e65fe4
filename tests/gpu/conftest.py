"""Tiny checkpoints made once, and engines on the GPU that tests of one file share."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer import LLM
from rapid_infer.ops.precompile import compiler
from rapid_infer.testing import TINY, GreedyRun, Oracle, make_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from gpu_lock import hold

Tiny = Callable[..., "TinyModel"]
OpenLLM = Callable[..., LLM]


@dataclass
class TinyModel:
    """A checkpoint directory, and what transformers makes of it on the CPU in fp32."""

    path: Path
    _oracle: Oracle | None = None
    _runs: dict[str, list[GreedyRun]] = field(default_factory=dict)

    @property
    def oracle(self) -> Oracle:
        if self._oracle is None:
            self._oracle = Oracle(self.path)
        return self._oracle

    def runs(self, lengths: tuple[int, ...], max_tokens: int, **options: Any) -> list[GreedyRun]:
        """`Oracle.clear_runs`, once for equal arguments."""
        key = json.dumps([lengths, max_tokens, options])
        if key not in self._runs:
            self._runs[key] = self.oracle.clear_runs(lengths, max_tokens, **options)
        return self._runs[key]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny("qwen3", {"vocab_size": 61})`: sizes of TINY unless the dict says otherwise; once for equal arguments."""
    made: dict[str, TinyModel] = {}

    def make(model_type: str, overrides: Mapping[str, Any] | None = None, **options: Any) -> TinyModel:
        from transformers import AutoConfig

        key = json.dumps([model_type, dict(overrides or {}), options], sort_keys=True)
        if key not in made:
            # Heads of one size everywhere, so that few kernels are compiled.
            config = AutoConfig.for_model(model_type, **{**TINY, "head_dim": 16, **(overrides or {})})
            made[key] = TinyModel(make_checkpoint(tmp_path_factory.mktemp(model_type), config, **options))
        return made[key]

    return make


@pytest.fixture(scope="session", autouse=True)
def _compile_when_launched() -> Iterator[None]:
    """Tests launch few of the kernels that a model may need, so compiling all beforehand would take longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_gpu_may_be_here", lambda: False)
        yield


@pytest.fixture(scope="module", autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Files marked `device_alone` measure memory, so they wait for the tests of other processes, and those for them."""
    with hold(alone=request.node.get_closest_marker("device_alone") is not None):
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def _opened() -> Iterator[dict[str, LLM]]:
    opened: dict[str, LLM] = {}
    yield opened
    for llm in opened.values():
        llm.close()
    opened.clear()


@pytest.fixture
def open_llm(_opened: dict[str, LLM]) -> Iterator[OpenLLM]:
    """The file's engine with these options, opened at its first use, with nothing cached.

    When the test is done, no block, row or request may be left behind in it.
    """
    used: list[LLM] = []

    def open_(model: TinyModel, **options: Any) -> LLM:
        options = {
            "device": "cuda",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "block_size": 16,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            **options,
        }
        key = json.dumps([str(model.path), options], sort_keys=True)
        if key not in _opened:
            _opened[key] = LLM(str(model.path), **options)
        llm = _opened[key]
        llm.reset_prefix_cache()
        used.append(llm)
        return llm

    yield open_
    for llm in used:
        assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    core = llm.engine.core
    while core.has_unfinished_requests():
        llm.engine.step()
    core.check_integrity()
    for pool in core.cache.pools:
        assert pool.num_free == pool.num_usable
        assert pool.num_deferred == 0
    scheduler = core.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.rows.num_free == scheduler.config.max_num_seqs
