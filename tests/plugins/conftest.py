"""Tiny checkpoints made once per session, and engines that must be whole when a test is done with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer import LLM
from rapid_infer.testing import TINY, Oracle, make_checkpoint


@dataclass
class TinyModel:
    """A checkpoint directory and its oracles, loaded when asked for."""

    path: Path
    oracles: dict[str, Oracle] = field(default_factory=dict)

    @property
    def oracle(self) -> Oracle:
        return self.oracle_in("float32")

    def oracle_in(self, dtype: str) -> Oracle:
        if dtype not in self.oracles:
            self.oracles[dtype] = Oracle(self.path, dtype)
        return self.oracles[dtype]


Tiny = Callable[..., TinyModel]
OpenLLM = Callable[..., LLM]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny("qwen3", {"head_dim": 32}, dtype="bfloat16")`: sizes of TINY unless the dict says otherwise.

    Made once for equal arguments.
    """
    made: dict[str, TinyModel] = {}

    def make(model_type: str, overrides: Mapping[str, Any] | None = None, **options: Any) -> TinyModel:
        from transformers import AutoConfig

        overrides = dict(overrides or {})
        key = json.dumps([model_type, overrides, options], sort_keys=True)
        if key not in made:
            config = AutoConfig.for_model(model_type, **{**TINY, **overrides})
            made[key] = TinyModel(make_checkpoint(tmp_path_factory.mktemp(model_type), config, **options))
        return made[key]

    return make


@pytest.fixture
def open_llm() -> Iterator[OpenLLM]:
    """Opens engines on the CPU in fp32. When the test is done, no block, row or request may be left behind in them."""
    opened: list[LLM] = []

    def open_(model: TinyModel | Path, **options: Any) -> LLM:
        path = model.path if isinstance(model, TinyModel) else model
        llm = LLM(str(path), **{"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, **options})
        opened.append(llm)
        return llm

    yield open_
    for llm in opened:
        assert_idle(llm)
        llm.close()


def assert_idle(llm: LLM) -> None:
    core = llm.engine.core
    while core.has_unfinished_requests():
        core.step()
    core.check_integrity()
    for pool in core.cache.pools:
        assert pool.num_free == pool.num_usable
        assert pool.num_deferred == 0
    scheduler = core.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.rows.num_free == scheduler.config.max_num_seqs


@pytest.fixture(scope="session")
def llama(tiny: Tiny) -> TinyModel:
    return tiny("llama")


@pytest.fixture(scope="session")
def qwen3(tiny: Tiny) -> TinyModel:
    return tiny("qwen3", {"head_dim": 32, "tie_word_embeddings": True})


@pytest.fixture(scope="session")
def windowed(tiny: Tiny) -> TinyModel:
    """Its first layer sees everything, the others the last 8 tokens: two cache groups."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return tiny("qwen3", {"head_dim": 32, "num_hidden_layers": 3, **windows})


@pytest.fixture(scope="session")
def mla(tiny: Tiny) -> TinyModel:
    """Caches a latent instead of keys and values, and has experts in its second layer."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
    return tiny("deepseek_v2", {"num_key_value_heads": 4, **sizes, **experts})
