"""On a machine without compiled kernels: all are compiled beside the start, and none after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer import LLM
from rapid_infer.ops.precompile.cache import VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2000}
MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
OPTIONS: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 1024, "max_model_len": 1500}


@pytest.mark.parametrize(
    ("model_type", "sizes", "options"),
    [
        ("qwen3", {**SIZES, "head_dim": 128, "tie_word_embeddings": True}, {}),
        ("qwen3_moe", {**SIZES, "head_dim": 64, **EXPERTS}, {"enforce_eager": True}),
        ("deepseek_v2", MLA, {}),
    ],
)
def test_nothing_is_compiled_after_the_start(
    model_type: str, sizes: dict[str, Any], options: dict[str, Any], tiny: Any, tmp_path: Path
) -> None:
    path = tiny(model_type, {"max_position_embeddings": 2048, **sizes}, dtype="bfloat16").path
    env = {**os.environ, "RAPID_INFER_CACHE": str(tmp_path)}
    env.pop(VARIABLE, None)
    script = Path(__file__).parent / "cold_start.py"
    command = [sys.executable, str(script), str(path), json.dumps({**OPTIONS, **options})]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["warnings"] == []
    assert found["later"] == []
    assert found["at_start"] == []


def test_graphs_recorded_late_are_counted(tiny: Any, open_llm: Any) -> None:
    from gpu_traffic import params, prompts

    llm: LLM = open_llm(tiny("qwen3"))
    before, _ = llm.engine.executor.late_graphs()
    llm.generate(prompts([5]), params("everything", 1, max_tokens=3, logprobs=2))
    after, seconds = llm.engine.executor.late_graphs()
    assert after > before
    assert seconds > 0
    llm.generate(prompts([5]), params("everything", 1, max_tokens=3, logprobs=2))
    assert llm.engine.executor.late_graphs()[0] == after
