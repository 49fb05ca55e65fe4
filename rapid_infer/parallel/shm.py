"""Collectives of ranks on the CPUs of one host, over shared memory.

Each rank lays out what it has and then says so with a counter; whoever waits reads the others' parts in the order of
the ranks. Two epochs are enough: whoever has seen all counters of a call knows that all have left the call before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rapid_infer.parallel.bus import CELL, SharedMemory, publish_before
from rapid_infer.parallel.comm import PlainComm, ordered_sum

SLOT_BYTES = 1 << 20
_EPOCHS = 2
_SPINS = 50


class ShmComm(PlainComm):
    """`entered` is called with each collective, so that others can see who is behind."""

    name = "shm"

    def __init__(
        self, memory: SharedMemory, rank: int, size: int, entered: Callable[[], object] = lambda: None
    ) -> None:
        self._memory, self._rank, self._size, self._entered = memory, rank, size, entered
        self._counters = memory.words(0, size)
        self._calls = 0
        slots = torch.frombuffer(memory.map, dtype=torch.uint8, offset=CELL * size)
        self._slots = slots.view(_EPOCHS, size, SLOT_BYTES)
        # Where ranks outnumber cores a spin keeps the one that is waited for from running.
        self._spins = _SPINS if size <= len(os.sched_getaffinity(0)) // 2 else 0

    @staticmethod
    def bytes_needed(size: int) -> int:
        return CELL * size + _EPOCHS * size * SLOT_BYTES

    def all_reduce(self, x: Tensor) -> Tensor:
        self._entered()
        flat = x.contiguous().view(-1)
        out = torch.empty_like(flat)
        step = SLOT_BYTES // x.element_size()
        for start in range(0, len(flat), step):
            out[start : start + step] = ordered_sum(self._exchange(flat[start : start + step]), x.dtype)
        return out.view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        self._entered()
        flat = x.contiguous().view(-1)
        out = torch.empty(self._size, len(flat), dtype=x.dtype)
        step = SLOT_BYTES // x.element_size()
        for start in range(0, len(flat), step):
            for rank, part in enumerate(self._exchange(flat[start : start + step])):
                out[rank, start : start + step] = part
        return out.view(self._size, *x.shape)

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """Every rank's piece, in order; good until the call after the next."""
        self._calls += 1
        call = self._calls
        nbytes = piece.nbytes
        epoch = self._slots[call % _EPOCHS]
        epoch[self._rank, :nbytes].view(piece.dtype).copy_(piece)
        publish_before()
        self._counters[self._rank] = call
        rounds = 0
        while int(self._counters.min()) < call:
            rounds += 1
            if rounds > self._spins:
                os.sched_yield()
            if rounds > 20_000:
                time.sleep(0.0005)
        return [epoch[rank, :nbytes].view(piece.dtype) for rank in range(self._size)]
