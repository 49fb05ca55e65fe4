"""Llama, Qwen2 and Qwen3 in fp32: the tokens of transformers exactly, its logits to 1e-4."""

from __future__ import annotations

from typing import Any

import pytest

from rapid_infer.cache import spec
from rapid_infer.cache.block_pool import BlockPool
from rapid_infer.layers.attention import CachedModule
from rapid_infer.registry import ModelRegistry
from rapid_infer.testing import assert_exact, lint_weight_map

LENGTHS = (1, 2, 15, 16, 17, 33, 70)
MAX_TOKENS = 12

# An original length of 64 puts the few frequencies of a small head on both sides of each formula's limits and between.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_ALL = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}
YARN_MSCALE = {**YARN, "mscale": 0.9, "mscale_all_dim": 0.6}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "vocab_size": 101}),
    "llama-wide-heads": ("llama", {"head_dim": 24, "num_key_value_heads": 2, "vocab_size": 257}),
    "llama-theta-eps": ("llama", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rms_norm_eps": 0.1}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-rope-yarn-all": ("llama", {"rope_parameters": YARN_ALL}),
    "llama-rope-yarn-mscale": ("llama", {"rope_parameters": YARN_MSCALE}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-rope-yarn": ("qwen2", {"rope_parameters": YARN, "num_attention_heads": 8}),
    "qwen2-windows": ("qwen2", {**WINDOWS, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-wide-heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-narrow-heads": ("qwen3", {"head_dim": 8, "num_key_value_heads": 4, "vocab_size": 131}),
    "qwen3-biases": ("qwen3", {"head_dim": 32, "attention_bias": True, "num_key_value_heads": 1}),
    "qwen3-rope-yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3-windows": ("qwen3", {**WINDOWS, "head_dim": 32, "max_window_layers": 1}),
    "qwen3-all-windows": ("qwen3", {**WINDOWS, "head_dim": 32, "max_window_layers": 0}),
    "qwen3-windows-off": ("qwen3", {**WINDOWS, "head_dim": 32, "max_window_layers": 1, "use_sliding_window": False}),
    "qwen3-layer-types": (
        "qwen3",
        {
            **WINDOWS,
            "head_dim": 32,
            "max_window_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_and_logits_as_transformers(name, tiny, open_llm):
    model = tiny(MODELS[name][0], MODELS[name][1])
    runs = model.oracle.clear_runs(LENGTHS, MAX_TOKENS)
    # A model that repeats itself would hide mistakes in positions and in the cache.
    assert sum(len(set(run.tokens)) for run in runs) > 0.4 * MAX_TOKENS * len(runs)
    assert_exact(open_llm(model), runs)


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


@pytest.mark.parametrize("architecture", ModelRegistry.architectures())
def test_weight_maps_have_no_faults(architecture):
    model: Any = ModelRegistry.resolve(architecture)
    assert lint_weight_map(model.weight_map) == []
