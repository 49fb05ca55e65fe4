"""A tiny model on two ranks that share the GPU: recorded steps, eager steps and one rank say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer import LLM, SamplingParams
from rapid_infer.executors.multi_process import SHARE_GPUS
from rapid_infer.testing import TINY, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 26,
    "gpu_memory_utilization": 0.3,
}
PROMPTS = [[5, 6, 7, 8, 9, 3], [1, 2, 3], [4] * 21]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3", **{**TINY, "head_dim": 64, "hidden_size": 256, "intermediate_size": 256})
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), config)


def run(path: Path, **options: Any) -> list[Any]:
    with LLM(str(path), **OPTIONS, **options) as llm:
        found = []
        for params in (
            SamplingParams(max_tokens=12, temperature=0),
            SamplingParams(max_tokens=12, temperature=0.9, seed=3),
            SamplingParams(max_tokens=6, temperature=0.9, top_k=20, seed=3, logprobs=2),
        ):
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params)])
        return found


def test_two_ranks_on_one_gpu_equal_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_GPUS, "1")
    alone = run(model)
    eager = run(model, tensor_parallel_size=2, enforce_eager=True)
    recorded = run(model, tensor_parallel_size=2)
    assert recorded == eager
    assert eager == alone
