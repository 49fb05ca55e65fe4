"""What ranks agree on: a provider of collectives that works on all of them, and the least that any can hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_infer import LLM
from rapid_infer.errors import ConfigError
from rapid_infer.executors import multi_process
from rapid_infer.executors.rank_messages import Allocate, Done, Profiled
from rapid_infer.parallel import select
from rapid_infer.parallel.comm import Comm
from rapid_infer.parallel.select import select_comm
from rapid_infer.testing.simulated_ranks import run_ranks

RANKS = 3


class WrongSum:
    """Adds one."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.name, self.all_gather = comm, "wrong", comm.all_gather

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._comm.all_reduce(x) + 1


@pytest.fixture
def votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in threads vote as those in processes do."""
    barrier, given = threading.Barrier(RANKS, timeout=30), [False] * RANKS

    def agree(yes: bool) -> bool:
        given[int(threading.current_thread().name)] = yes
        barrier.wait()
        all_say = all(given)
        barrier.wait()
        return all_say

    monkeypatch.setattr(select, "agree", agree)


def choose(offered: Callable[[int, Comm], dict[str, Callable[[], Any]]]) -> list[str]:
    def run(parallel: Any) -> str:
        threading.current_thread().name = str(parallel.tp_rank)
        candidates = offered(parallel.tp_rank, parallel.comm)
        return select_comm(candidates, parallel.tp_rank, RANKS, torch.device("cpu")).name

    return run_ranks(RANKS, run)


def fails() -> Comm:
    raise RuntimeError("no peer access")


@pytest.mark.usefixtures("votes")
def test_a_provider_that_one_rank_cannot_use_is_dropped_by_all_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def offered(rank: int, comm: Comm) -> dict[str, Callable[[], Any]]:
        return {"push": fails if rank == 1 else lambda: comm, "plain": lambda: comm}

    with caplog.at_level(logging.WARNING):
        assert choose(offered) == ["threads"] * RANKS
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 cannot use collectives over push: RuntimeError: no peer access"
    ]


@pytest.mark.usefixtures("votes")
def test_a_provider_that_adds_wrongly_on_one_rank_is_dropped_and_none_is_an_error() -> None:
    def offered(rank: int, comm: Comm) -> dict[str, Callable[[], Any]]:
        return {"push": lambda: WrongSum(comm) if rank == 2 else comm}

    with pytest.raises(ConfigError, match="no collectives work on all 3 ranks; tried push"):
        choose(offered)


def test_the_rank_that_can_hold_least_decides(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Ranks:
        def send(self, message: Any) -> None:
            sent.append(message)

        def answers(self, kind: type) -> list[Any]:
            return [Done("load")] if kind is Done else [Profiled((90,), 64, 5), Profiled((70,), 48, 6)]

        def close(self, grace: float = 0) -> None:
            pass

    monkeypatch.setattr(multi_process, "start_ranks", lambda config: Ranks())
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
    with LLM(str(checkpoint("qwen3")), tensor_parallel_size=2, **options) as llm:
        info = llm.engine.core.info
        assert (info.num_blocks, info.max_model_len) == ((70,), 48)
        assert [one.num_blocks for one in sent if isinstance(one, Allocate)] == [(70,)]
