"""Ranks of one process, each in a thread of its own: layers over several ranks without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from rapid_infer.parallel.comm import PlainComm, ordered_sum
from rapid_infer.parallel.state import ParallelState

T = TypeVar("T")

_WAIT = 60.0


class _Exchange:
    """What the ranks lay out for each other; a barrier before it is read and one after."""

    def __init__(self, size: int) -> None:
        self.given: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_WAIT)


class ThreadComm(PlainComm):
    """One thread's side. `sums` counts its reductions."""

    name = "threads"

    def __init__(self, exchange: _Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank
        self.sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        return ordered_sum(self.all_gather(x), x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        self._exchange.given[self._rank] = x.clone()
        self._exchange.barrier.wait()
        given = [one for one in self._exchange.given if one is not None]
        if any(one.shape != x.shape or one.dtype != x.dtype for one in given):
            raise ValueError(f"ranks gave {[(tuple(one.shape), one.dtype) for one in given]}")
        gathered = torch.stack(given)
        self._exchange.barrier.wait()
        return gathered


def run_ranks(size: int, run: Callable[[ParallelState], T], *, ep_size: int = 1) -> list[T]:
    """`run(parallel)` on every rank; what each returned. Raises what the first rank to fail raised."""
    exchange = _Exchange(size)
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            with torch.inference_mode():
                results[number] = run(ParallelState(number, size, ep_size=ep_size, comm=ThreadComm(exchange, number)))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]
