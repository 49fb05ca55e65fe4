"""Quantized checkpoints of every format that is read: the same logits as of the values they stand for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer import SamplingParams
from rapid_infer.testing import record_logits

SPEC = importlib.util.spec_from_file_location(
    "quantize_checkpoint", Path(__file__).resolve().parents[2] / "scripts" / "quantize_checkpoint.py"
)
script: Any = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = script
SPEC.loader.exec_module(script)

PROMPTS = [[5, 6, 7, 8, 9, 30, 31, 77], [11, 12, 13]]
# Parts of unlike sizes, blocks of 128 that are cut short in both directions.
DENSE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2}
MOE = {
    "hidden_size": 192, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
    "mlp_only_layers": [0],
}  # fmt: skip
MLA = {
    "hidden_size": 192, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "q_lora_rank": 96, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
MODELS = {"dense": ("llama", DENSE), "moe": ("qwen3_moe", MOE), "mla": ("deepseek_v2", MLA)}
EXPERTS_ONLY = {"mxfp4-experts", "fp8-fp4-experts"}
NO_EXPERTS = {"gptq-act-order", "ct-int4-act-order", "modelopt-nvfp4-awq"}
CASES = [
    (model, name)
    for name in script.TARGETS
    for model in MODELS
    if not (model == "dense" and name in EXPERTS_ONLY) and not (model != "dense" and name in NO_EXPERTS)
]


def logits(llm: Any) -> torch.Tensor:
    with record_logits(llm) as recorded:
        for prompt in PROMPTS:
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    return torch.cat(recorded)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_logits_are_those_of_the_dequantized_model(
    model: str, name: str, tiny: Any, open_llm: Any, tmp_path: Path
) -> None:
    kind, sizes = MODELS[model]
    quantized, plain = script.quantize_checkpoint(tiny(kind, sizes).path, tmp_path, name)
    llm = open_llm(quantized)
    got, expected = logits(llm), logits(open_llm(plain))
    assert expected.abs().max() > 1
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    counts = llm.engine.executor.built.ops.counts()
    ran = {op.partition("=")[0] for op, count in counts.items() if count}
    assert ("quantized_linear" in ran) == (name != "mxfp4-experts")
    assert ("quantized_experts" in ran) == (model != "dense")
    # All experts are multiplied quantized or none.
    assert "fused_experts" not in ran
