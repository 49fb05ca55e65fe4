"""DeepSeek-V2, V3 and Qwen3-MoE in fp32: the tokens of transformers exactly, its logits to 1e-4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rapid_infer import LLM, ModelRegistry
from rapid_infer.config import CheckpointInfo, DeviceInfo, EngineArgs
from rapid_infer.errors import ConfigError, WeightError
from rapid_infer.models import read_checkpoint
from rapid_infer.testing import Oracle, assert_exact, forced_logits
from rapid_infer.worker.build import build_model, cache_groups

LENGTHS = (1, 2, 15, 16, 17, 33, 70)
MAX_TOKENS = 12


def yarn(mscale: float | None, mscale_all_dim: float | None) -> dict[str, Any]:
    """An original length of 64: YaRN's factors and ramp show at positions that a short test reaches."""
    given = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        **{name: value for name, value in given.items() if value is not None},
    }


MLA = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": yarn(0.707, 0.707),
}
V2_LITE = {**MLA, "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "topk_method": "greedy"}
# Five experts a token from two groups: without the limit nearly every token would take them from three or four.
V2 = {
    **MLA,
    "q_lora_rank": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 5,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 3.0,
}
V3 = {
    **MLA,
    "q_lora_rank": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": yarn(1.0, 1.0),
}
QWEN = {"head_dim": 32, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("deepseek_v2", V2_LITE),
    "v2-lite-plain-rope": ("deepseek_v2", {**V2_LITE, "rope_parameters": PLAIN_ROPE}),
    "v2-lite-scaled": ("deepseek_v2", {**V2_LITE, "routed_scaling_factor": 2.0}),
    "v2-lite-all-sparse": ("deepseek_v2", {**V2_LITE, "first_k_dense_replace": 0, "vocab_size": 97}),
    "v2-lite-tied-one-expert": ("deepseek_v2", {**V2_LITE, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "v2": ("deepseek_v2", V2),
    "v2-mscale-differs": ("deepseek_v2", {**V2, "rope_parameters": yarn(1.0, 0.5)}),
    "v2-no-mscale": ("deepseek_v2", {**V2, "rope_parameters": yarn(None, None)}),
    "v3": ("deepseek_v3", V3),
    "v3-not-renormalized": ("deepseek_v3", {**V3, "norm_topk_prob": False}),
    "v3-no-query-latent": ("deepseek_v3", {**V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "v3-halves": ("deepseek_v3", {**V3, "rope_interleave": False}),
    "qwen3-moe": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "qwen3-moe-not-renormalized": ("qwen3_moe", {**QWEN, "norm_topk_prob": False}),
    "qwen3-moe-every-second": ("qwen3_moe", {**QWEN, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3-moe-first-dense": ("qwen3_moe", {**QWEN, "norm_topk_prob": True, "mlp_only_layers": [0, 2]}),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_and_logits_as_transformers(name, tiny, open_llm):
    model = tiny(MODELS[name][0], MODELS[name][1])
    runs = model.oracle.clear_runs(LENGTHS, MAX_TOKENS)
    assert sum(len(set(run.tokens)) for run in runs) > 0.4 * MAX_TOKENS * len(runs)
    assert_exact(open_llm(model), runs)


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_reference_operators_give_the_same(name, tiny, open_llm):
    model = tiny(MODELS[name][0], MODELS[name][1])
    ops = ["mla_kv_write", "mla_decode", "mla_context", "mla_prefill", "route_experts", "fused_experts"]
    llm = open_llm(model, op_priority={op: ["torch"] for op in ops}, max_num_batched_tokens=16)
    assert_exact(llm, model.oracle.clear_runs(LENGTHS, MAX_TOKENS))
    counts = llm.engine.executor.built.ops.counts()
    assert all(counts[f"{op}=torch"] > 0 for op in ops)


@pytest.mark.parametrize("name", ["v2", "v3", "qwen3-moe"])
def test_triton_operators_give_the_same(name, tiny, open_llm):
    pytest.importorskip("triton")
    model = tiny(MODELS[name][0], MODELS[name][1])
    ops = ["mla_kv_write", "mla_decode", "mla_context", "mla_prefill", "route_experts", "fused_experts"]
    llm = open_llm(model, op_priority={op: ["triton"] for op in ops}, max_num_batched_tokens=16)
    assert_exact(llm, model.oracle.clear_runs((3, 20), 3))
    assert llm.engine.executor.built.ops.counts()["fused_experts=triton"] > 0


def test_another_grouped_product_gives_the_same(tiny, open_llm):
    model = tiny(*MODELS["v3"])
    llm = open_llm(model, op_priority={"fused_experts": ["grouped_mm"]})
    assert_exact(llm, model.oracle.clear_runs(LENGTHS, MAX_TOKENS))


def rewritten(model: Any, to: Path, change: Any, config: dict[str, Any] | None = None) -> Path:
    """A copy of the checkpoint with its tensors changed by `change(dict)`, and keys of config.json replaced."""
    shutil.copytree(model.path, to, dirs_exist_ok=True)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    if config:
        file = to / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return to


@pytest.mark.parametrize("name", ["v2", "v3", "qwen3-moe"])
def test_rotary_tables_and_masks_in_the_file_change_nothing(name, tiny, open_llm, tmp_path):
    def add(weights):
        attention = "model.layers.1.self_attn"
        weights[f"{attention}.rotary_emb.inv_freq"] = torch.rand(4)
        weights["model.rotary_emb.sin_cached"] = torch.rand(8, 4)
        weights[f"{attention}.bias"] = torch.ones(1, 1, 8, 8)

    model = tiny(*MODELS[name])
    assert_exact(open_llm(rewritten(model, tmp_path, add)), model.oracle.clear_runs(LENGTHS, MAX_TOKENS))


GATE = "model.layers.1.mlp.gate"


@pytest.mark.parametrize("shift", [0.0, -3.0], ids=["spread", "below-zero"])
def test_biases_that_change_the_choice(shift, tiny, open_llm, tmp_path):
    """Below zero a group that is out must be out by minus infinity: a mask of zeros would put it first."""
    generator = torch.Generator().manual_seed(1)

    def spread(weights):
        for name in weights:
            if name.endswith("e_score_correction_bias"):
                weights[name] = shift + 0.5 * torch.randn(weights[name].shape, generator=generator)

    model = tiny(*MODELS["v3"])
    path = rewritten(model, tmp_path, spread)
    oracle = Oracle(path)
    runs = oracle.clear_runs(LENGTHS, MAX_TOKENS)
    llm = open_llm(path)
    assert_exact(llm, runs)
    chosen, without = choices(llm, runs[-1].prompt), choices(open_llm(model), runs[-1].prompt)
    assert (chosen != without).any(dim=1).float().mean() > 0.5


def choices(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Experts of the first sparse layer for the prompt's tokens, sorted."""
    model = llm.engine.executor.built.model
    gate = next(layer.mlp.gate for layer in model.layers if hasattr(layer.mlp, "gate"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(prompt), gate.weight.shape[1], generator=generator)
    return gate(x, None)[1].sort(dim=1).values


@pytest.mark.parametrize(("name", "limit"), [("v2", 2), ("v3", 2)])
def test_a_tokens_experts_stand_in_the_kept_groups(name, limit, tiny, open_llm):
    llm = open_llm(tiny(*MODELS[name]))
    groups = choices(llm, list(range(200))) // 4
    assert max(len(set(row)) for row in groups.tolist()) == limit


def test_the_routed_part_is_scaled_once(tiny, open_llm, tmp_path):
    """Twice the factor on half of every expert's output is the same model: it enters once, and linearly."""
    model = tiny(*MODELS["v2-lite-scaled"])

    def halve(weights):
        for name in weights:
            if ".experts." in name and "down_proj" in name:
                weights[name] = weights[name] / 2

    path = rewritten(model, tmp_path, halve, {"routed_scaling_factor": 4.0})
    assert_exact(open_llm(path), model.oracle.clear_runs(LENGTHS, MAX_TOKENS))


def test_fused_experts_load_as_well(tiny, open_llm, tmp_path):
    model = tiny(*MODELS["v3"])

    def fuse(weights):
        for layer in (1, 2):
            under = f"model.layers.{layer}.mlp.experts"

            def each(part, under=under):
                return [weights.pop(f"{under}.{expert}.{part}.weight") for expert in range(16)]

            gate, up, down = each("gate_proj"), each("up_proj"), each("down_proj")
            weights[f"{under}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
            weights[f"{under}.down_proj"] = torch.stack(down)

    path = rewritten(model, tmp_path, fuse)
    assert not any(".experts.0." in name for name in load_file(path / "model.safetensors"))
    assert_exact(open_llm(path), model.oracle.clear_runs(LENGTHS, MAX_TOKENS))


def test_draft_layers_are_ignored_with_a_reason(tiny, open_llm, tmp_path):
    model = tiny(*MODELS["v3"])

    def add(weights):
        for name in [name for name in weights if name.startswith("model.layers.2.")]:
            weights[name.replace("layers.2", "layers.3")] = weights[name].clone()
        for extra in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"):
            weights[f"model.layers.3.{extra}.weight"] = torch.ones(4, 4)

    path = rewritten(model, tmp_path, add, {"num_nextn_predict_layers": 1})
    llm = open_llm(path)
    ignored = llm.engine.executor.built.report.ignored
    assert "model.layers.3.eh_proj.weight" in ignored
    assert all(name.startswith("model.layers.3.") and "multi-token" in why for name, why in ignored.items())
    assert_exact(llm, model.oracle.clear_runs(LENGTHS, MAX_TOKENS))
    path = rewritten(model, tmp_path, add, {"num_nextn_predict_layers": 0, "num_mtp_layers": 0})
    with pytest.raises(WeightError, match=r"unexpected[\s\S]*model\.layers\.3\.eh_proj"):
        open_llm(path)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("model.layers.1.mlp.experts.5.up_proj.weight", r"layers\.1\.mlp\.experts\.gate_up_proj\.weight.*expert 5 \(1"),
        ("model.layers.2.mlp.experts.15.down_proj.weight", r"layers\.2\.mlp\.experts\.down_proj\.weight.*expert 15"),
        (f"{GATE}.e_score_correction_bias", r"layers\.1\.mlp\.gate\.e_score_correction_bias"),
        ("model.layers.0.self_attn.kv_b_proj.weight", r"layers\.0\.self_attn\.kv_b_proj\.weight"),
        ("model.layers.0.self_attn.q_a_proj.weight", r"layers\.0\.self_attn\.qkv_a_proj\.weight.*q_a"),
        ("model.layers.0.self_attn.kv_a_layernorm.weight", r"layers\.0\.self_attn\.kv_a_layernorm\.weight"),
    ],
)
def test_what_is_missing_is_named(lost, said, tiny, tmp_path, open_llm):
    path = rewritten(tiny(*MODELS["v3"]), tmp_path, lambda weights: weights.pop(lost))
    with pytest.raises(WeightError, match=said):
        open_llm(path)


@pytest.mark.parametrize(
    ("name", "updates", "named"),
    [
        ("v2", {"topk_method": "thresholds"}, "thresholds"),
        ("v3", {"scoring_func": "tanh"}, "tanh"),
        ("v3", {"topk_method": "greedy"}, "greedy"),
        ("v3", {"n_group": 3}, "3 equal groups"),
        ("v2", {"num_experts_per_tok": 9}, "9 experts a token"),
        ("v2", {"attention_bias": True}, "attention_bias"),
        ("v3", {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes.*nothing inst"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, updates, named, tiny, tmp_path, open_llm):
    path = rewritten(tiny(*MODELS[name]), tmp_path, lambda weights: None, updates)
    with pytest.raises(ConfigError, match=named):
        open_llm(path)


@pytest.mark.parametrize(
    ("name", "billions", "bytes_per_token"), [("deepseek-v2-lite", 15.706, 31104), ("qwen3-30b-a3b", 30.532, 98304)]
)
def test_published_sizes(name, billions, bytes_per_token, tmp_path):
    shapes = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "workloads.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(shapes.read_text())["models"][name]))
    checkpoint = read_checkpoint(tmp_path)
    args = EngineArgs(dtype="bfloat16", max_model_len=4096)
    config = args.resolve(CheckpointInfo(40960, "bfloat16"), DeviceInfo("cpu", True, 1 << 40))
    model = build_model(ModelRegistry.resolve(checkpoint.architecture), checkpoint, config, "meta").model
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=1e-4)
    assert sum(group.bytes_per_token() for group in cache_groups(model)) == bytes_per_token


def test_moe_layer_freq_leaves_layers_dense(tiny):
    from rapid_infer_deepseek_v2.model import DeepseekV2ForCausalLM
    from transformers import AutoConfig

    path = tiny(*MODELS["v2-lite"]).path
    config = AutoConfig.from_pretrained(path, num_hidden_layers=6, first_k_dense_replace=3)
    config.moe_layer_freq = 2
    assert DeepseekV2ForCausalLM.read_config(config).sparse == (False, False, False, False, True, False)


def test_the_latent_is_all_that_is_cached(tiny, open_llm):
    llm = open_llm(tiny(*MODELS["v2"]))
    (pool,) = llm.engine.core.cache.pools
    assert pool.num_free == pool.num_usable
    plan = llm.engine.executor.cache_plan
    # Keys and values of four heads would take 3 * 4 * (24 + 24) * 4 bytes.
    assert plan.bytes_per_block // plan.block_size == 3 * (32 + 8) * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["v2-lite", "v3", "qwen3-moe"])
def test_rounding_is_no_worse_than_that_of_transformers(name, dtype, tiny, open_llm):
    """By the median: where rounding gives a token another expert, its logits jump, with transformers as well."""
    model = tiny(*MODELS[name], dtype=dtype)
    exact, rounded = model.oracle, model.oracle_in(dtype)
    llm = open_llm(model, dtype=dtype)
    mine, theirs = [], []
    for run in exact.greedy(exact.prompts((1, 16, 17, 40)), 8):
        places = range(len(run.prompt) - 1, len(run.prompt) + 7)
        mine.append(forced_logits(llm, run) - run.logits)
        theirs.append(rounded.logits([run.prompt + run.tokens])[0, places] - run.logits)
    ours, reference = (torch.cat(errors).abs().median().item() for errors in (mine, theirs))
    print(f"median error in {dtype}: {ours:.2e}, transformers {reference:.2e}")
    assert ours <= 1.3 * reference
