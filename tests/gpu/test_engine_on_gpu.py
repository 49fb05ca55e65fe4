"""The engine on a CUDA device gives the tokens of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rapid_infer import LLM, SamplingParams
from rapid_infer.testing.tiny import TINY, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config

    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), Qwen3Config(**TINY, head_dim=16))


def tokens(model: Path, params: SamplingParams, **kwargs: object) -> list[list[int]]:
    prompts = [[(7 * i + j) % 199 for j in range(3 + 11 * i)] for i in range(6)]
    with LLM(str(model), skip_tokenizer_init=True, dtype="float32", **kwargs) as llm:
        outputs = llm.generate(prompts, params)
        llm.engine.core.check_integrity()
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("chunk", [16, 512])
def test_greedy_tokens_equal_those_of_the_cpu(model: Path, queue_depth: int, chunk: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = tokens(model, params, device="cpu")
    assert tokens(model, params, device="cuda", queue_depth=queue_depth, max_num_batched_tokens=chunk) == expected


def test_sampled_tokens_equal_those_of_the_cpu(model: Path) -> None:
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, n=2, max_tokens=16)
    assert tokens(model, params, device="cuda") == tokens(model, params, device="cpu")
