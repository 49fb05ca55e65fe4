"""What is special to models with experts or latent attention, beside `test_conformance.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rapid_infer_deepseek_v2.conformance import LITE, V2, V3
from rapid_infer_qwen3.conformance import EXPERTS
from safetensors.torch import load_file, save_file

from rapid_infer import LLM, ModelRegistry
from rapid_infer.config import CheckpointInfo, DeviceInfo, EngineArgs
from rapid_infer.errors import ConfigError, WeightError
from rapid_infer.models import read_checkpoint
from rapid_infer.testing import Oracle, assert_exact, forced_logits
from rapid_infer.worker.build import build_model, cache_groups

LENGTHS = (1, 2, 15, 16, 17, 33, 70)
MAX_TOKENS = 12


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("deepseek_v2", LITE),
    "v2-lite-scaled": ("deepseek_v2", {**LITE, "routed_scaling_factor": 2.0}),
    "v2": ("deepseek_v2", V2),
    "v3": ("deepseek_v3", V3),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 32, "num_hidden_layers": 3, **EXPERTS}),
}


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_reference_operators_give_the_same(name, tiny, open_llm):
    model = tiny(MODELS[name][0], MODELS[name][1])
    ops = ["mla_kv_write", "mla_decode", "mla_context", "mla_prefill", "route_experts", "fused_experts"]
    llm = open_llm(model, op_priority={op: ["torch"] for op in ops}, max_num_batched_tokens=16)
    assert_exact(llm, model.oracle.clear_runs(LENGTHS, MAX_TOKENS))
    counts = llm.engine.executor.built.ops.counts()
    assert all(counts[f"{op}=torch"] > 0 for op in ops)


@pytest.mark.parametrize("name", ["v3"])
def test_triton_operators_give_the_same(name, tiny, open_llm):
    """One model with all of them; `test_ops.py` has each with every kind of router."""
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
        ("v3", {"n_group": 3}, "3 equal groups"),
        ("v2", {"num_experts_per_tok": 9}, "9 experts a token"),
        ("v3", {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes.*nothing inst"),
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


@pytest.mark.parametrize("dtype", ["float16"])
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
