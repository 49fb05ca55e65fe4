"""The bus between processes of one host: rings of messages and a board of counters in shared memory without a name.

A memory file (`memfd`) is handed on as a descriptor, so nothing can be left behind in /dev/shm and two engines never
meet. The bus moves bytes and knows no message.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Callable

import numpy as np

from rapid_infer.errors import RapidInferError

CELL = 64
"""Bytes of a cache line: counters that different processes write do not share one."""

SPIN_SECONDS, YIELD_SECONDS, BLOCK_SECONDS = 0.001, 0.02, 0.05
_ALIGN = 8
_WRAP = 2**64 - 1
_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")
_fence = threading.Lock()


class BusError(RapidInferError, RuntimeError):
    """A message that is larger than the ring takes."""


def publish_before() -> None:
    """What was written before is seen by other processes before what is written after."""
    if not _ORDERED_STORES:
        # A release and then an acquire, each of which a lock's two halves are.
        for _ in range(2):
            with _fence:
                pass


class SharedMemory:
    """`size` bytes that processes share which have the descriptor; a new file when `fd` is None."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.fd = os.memfd_create("rapid-infer", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)

    def words(self, start: int, count: int) -> np.ndarray:
        """int64 `[count]`, one in each cell from byte `start` on."""
        return np.frombuffer(self.map, np.int64, count * CELL // 8, start)[:: CELL // 8]

    def close(self) -> None:
        """Whoever has `words` of it must have dropped them, or its mapping stays until they are gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):
            # A mapping has a descriptor of its own.
            self.map.close()


def wait_until(ready: Callable[[], bool], block: Callable[[float], object], check: Callable[[], object]) -> None:
    """Spin for a millisecond, then yield the core, then block, until `ready`.

    `block(seconds)` may return early and is never trusted to have been woken; `check` is called now and then and may
    raise.
    """
    started = time.monotonic()
    rounds = 0
    while not ready():
        rounds += 1
        waited = time.monotonic() - started
        if waited < SPIN_SECONDS:
            continue
        if rounds % 64 == 0 or waited > YIELD_SECONDS:
            check()
        if waited < YIELD_SECONDS:
            os.sched_yield()
        else:
            block(BLOCK_SECONDS)


class Ring:
    """Messages from one writer to each of `readers`, in order, in `SharedMemory` of `Ring.size(...)` bytes.

    Positions count bytes for ever; those of the readers say what may be overwritten. `wake` are event descriptors, one
    for each reader, by which a reader that blocks is woken.
    """

    def __init__(self, memory: SharedMemory, capacity: int, readers: int, wake: list[int]) -> None:
        self._memory, self.capacity, self._readers, self._wake = memory, capacity, readers, wake
        self._written = memory.words(0, 1)
        self._read = memory.words(CELL, readers)
        self._asleep = memory.words(CELL * (1 + readers), readers)
        self._data = memoryview(memory.map)[self.head(readers) :]

    @staticmethod
    def head(readers: int) -> int:
        return CELL * (1 + 2 * readers)

    @classmethod
    def size(cls, capacity: int, readers: int) -> int:
        return cls.head(readers) + capacity

    def write(self, payload: bytes, check: Callable[[], object]) -> None:
        """Waits while a reader is a whole ring behind; `check` may raise then. BusError for too large a message."""
        need = _ALIGN + -(-len(payload) // _ALIGN) * _ALIGN
        if need > self.capacity // 2:
            raise BusError(f"a message of {len(payload)} bytes is larger than the bus takes: {self.capacity // 2}")
        position = int(self._written[0])
        at = position % self.capacity
        skipped = self.capacity - at if at + need > self.capacity else 0
        end = position + skipped + need
        if end - int(self._read.min()) > self.capacity:
            wait_until(lambda: end - int(self._read.min()) <= self.capacity, time.sleep, check)
        if skipped:
            self._data[at : at + _ALIGN] = _WRAP.to_bytes(8, "little")
            at = 0
        self._data[at : at + _ALIGN] = len(payload).to_bytes(8, "little")
        self._data[at + _ALIGN : at + _ALIGN + len(payload)] = payload
        publish_before()
        self._written[0] = end
        for reader in range(self._readers):
            if self._asleep[reader]:
                os.eventfd_write(self._wake[reader], 1)

    def has_message(self, reader: int) -> bool:
        return self._written[0] != self._read[reader]

    def read(self, reader: int) -> bytes | None:
        """The next message; None when there is none."""
        position = int(self._read[reader])
        if self._written[0] == position:
            return None
        at = position % self.capacity
        length = int.from_bytes(self._data[at : at + _ALIGN], "little")
        if length == _WRAP:
            position += self.capacity - at
            at = 0
            length = int.from_bytes(self._data[:_ALIGN], "little")
        payload = bytes(self._data[at + _ALIGN : at + _ALIGN + length])
        publish_before()
        self._read[reader] = position + _ALIGN + -(-length // _ALIGN) * _ALIGN
        return payload

    def block(self, reader: int, seconds: float) -> None:
        """Sleep until a message comes, at most so long."""
        self._asleep[reader] = 1
        publish_before()
        try:
            if not self.has_message(reader):
                poll = select.poll()
                poll.register(self._wake[reader], select.POLLIN)
                if poll.poll(seconds * 1000):
                    os.eventfd_read(self._wake[reader])
        finally:
            self._asleep[reader] = 0

    def close(self) -> None:
        self._data.release()
        del self._written, self._read, self._asleep
        self._memory.close()


class StatusBoard:
    """What each rank says of itself: phase, steps begun, collectives entered, work begun (tensors read, layers run),
    steps ended, a checksum of all its tokens, late graphs and the microseconds they took.

    The one who is behind has the fewest steps and collectives.
    """

    FIELDS = ("phase", "steps", "collectives", "work", "collected", "tokens", "late_graphs", "late_us")
    phase: np.ndarray
    steps: np.ndarray
    collectives: np.ndarray
    work: np.ndarray
    collected: np.ndarray
    tokens: np.ndarray
    late_graphs: np.ndarray
    late_us: np.ndarray

    def __init__(self, memory: SharedMemory, ranks: int) -> None:
        self._memory = memory
        for number, name in enumerate(self.FIELDS):
            setattr(self, name, memory.words(number * ranks * CELL, ranks))

    @classmethod
    def size(cls, ranks: int) -> int:
        return len(cls.FIELDS) * ranks * CELL

    def snapshot(self) -> tuple[tuple[int, ...], ...]:
        """For each rank (phase, steps, collectives, work)."""
        return tuple(zip(*(getattr(self, name).tolist() for name in self.FIELDS[:4])))

    def close(self) -> None:
        for name in self.FIELDS:
            delattr(self, name)
        self._memory.close()
