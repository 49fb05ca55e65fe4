"""What is special to dense models beside `test_conformance.py`: other operators, and windows."""

from __future__ import annotations

from typing import Any

import pytest

from rapid_infer.cache import spec
from rapid_infer.cache.block_pool import BlockPool
from rapid_infer.layers.attention import CachedModule
from rapid_infer.testing import assert_exact

LENGTHS = (1, 2, 15, 16, 17, 33, 70)
MAX_TOKENS = 12

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2-windows": ("qwen2", {**WINDOWS, "max_window_layers": 2}),
    "qwen3-tied-wide-heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-windows": ("qwen3", {**WINDOWS, "head_dim": 32, "max_window_layers": 1}),
    "qwen3-all-windows": ("qwen3", {**WINDOWS, "head_dim": 32, "max_window_layers": 0}),
    "qwen3-windows-off": ("qwen3", {**WINDOWS, "head_dim": 32, "max_window_layers": 1, "use_sliding_window": False}),
    "qwen3-layer-types": ("qwen3", {**WINDOWS, "head_dim": 32, "max_window_layers": 3, "layer_types": MIXED}),
}


@pytest.mark.parametrize("name", ["llama-rope-yarn", "qwen3-tied-wide-heads"])
def test_reference_operators_give_the_same(name, tiny, open_llm):
    model = tiny(MODELS[name][0], MODELS[name][1])
    llm = open_llm(model, op_priority={"paged_attention": ["torch"]})
    assert_exact(llm, model.oracle.clear_runs(LENGTHS, MAX_TOKENS))
    counts = llm.engine.executor.built.ops.counts()
    assert counts["paged_attention=torch"] > 0
    assert "paged_attention=cpu" not in counts


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", 1),
        ("qwen2-windows", 3),
        ("qwen3-windows", 3),
        ("qwen3-all-windows", 1),
        ("qwen3-windows-off", 1),
        ("qwen3-layer-types", 3),
    ],
)
def test_layers_with_and_without_window_are_cache_groups(name, groups, tiny, open_llm):
    # Two layers of one kind and one of the other: groups of a layer each, which share one pool.
    llm = open_llm(tiny(MODELS[name][0], MODELS[name][1]))
    assert len(llm.engine.core.cache.pools) == 1
    assert llm.engine.core.cache.num_groups == groups


@pytest.mark.parametrize("name", ["qwen2-windows", "qwen3-all-windows", "qwen3-layer-types"])
@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_that_windows_gave_back_are_read_by_nobody(name, depth, tiny, open_llm, monkeypatch):
    monkeypatch.setattr(spec, "KEY_TILE", 1)
    model = tiny(MODELS[name][0], MODELS[name][1])
    options = {"block_size": 4, "max_num_batched_tokens": 24, "enable_prefix_caching": False}
    llm = open_llm(model, **options, queue_depth=depth)
    given_back = 0
    original = BlockPool.release

    def spoil(pool, blocks):
        nonlocal given_back
        original(pool, blocks)
        if free := [block for block in blocks if pool.count(block) == 0]:
            given_back += len(free)
            for module in llm.engine.executor.built.model.modules():
                if isinstance(module, CachedModule) and module.cache_spec.window:
                    module.k_cache[free] = module.v_cache[free] = float("nan")

    monkeypatch.setattr(BlockPool, "release", spoil)
    assert_exact(llm, model.oracle.clear_runs(LENGTHS, MAX_TOKENS))
    assert given_back > 20
