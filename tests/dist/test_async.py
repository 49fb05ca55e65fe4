"""An engine process whose model runs on several ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rapid_infer import LLM, AsyncLLM, SamplingParams

OPTIONS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4}


@pytest.mark.slow
def test_the_ranks_of_an_engine_process_serve_its_front_and_end_with_it(checkpoint: Callable[..., Path]) -> None:
    path, params = str(checkpoint("qwen3")), SamplingParams(max_tokens=6, temperature=0)

    async def ask() -> list[int]:
        llm = AsyncLLM(path, tensor_parallel_size=2, **OPTIONS)
        try:
            async for output in llm.generate([1, 2, 3], params):
                last = output
            return list(last.outputs[0].token_ids)
        finally:
            llm.shutdown()

    found = asyncio.run(ask())
    with LLM(path, **OPTIONS) as llm:
        assert found == list(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids)
