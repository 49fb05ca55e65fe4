"""An engine process whose model runs on several ranks."""

from __future__ import annotations

import asyncio
import os
import re
import signal
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


def descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [*children, *(one for child in children for one in descendants(child))]


@pytest.mark.slow
def test_a_front_learns_of_a_rank_that_dies_while_nothing_runs(checkpoint: Callable[..., Path]) -> None:
    async def wait() -> str:
        llm = AsyncLLM(str(checkpoint("qwen3")), tensor_parallel_size=2, **OPTIONS)
        try:
            async for _ in llm.generate([1, 2, 3], SamplingParams(max_tokens=1)):
                pass
            ranks = [
                pid
                for pid in descendants(llm._process.process.pid)
                if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            async with asyncio.timeout(20):
                while llm.dead_error is None:
                    await asyncio.sleep(0.05)
            return str(llm.dead_error)
        finally:
            llm.shutdown()

    assert re.search(r"rank \d \(pid \d+\) was killed by SIGKILL .*in phase idle", asyncio.run(wait()))
