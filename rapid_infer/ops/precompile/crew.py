"""Processes that work off jobs on all cores."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import IO

import msgspec

Job = Callable[[], str]


class Crew:
    """Forked processes that work off jobs. A context manager, which ends them.

    `done` holds the numbers of jobs that are done, `failed` why others are not. `parent` can be read from once nobody
    waits for the jobs any more.
    """

    def __init__(self, parent: IO[str] | socket.socket) -> None:
        self._parent = parent
        self._jobs: list[Job] = []
        self._children: list[int] = []
        self._pipe = os.pipe()
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    @property
    def total(self) -> int:
        return len(self._jobs)

    def start(self, jobs: Sequence[Job], processes: int) -> None:
        """Let new processes work off these jobs in their order, each taking the next one when it is done with one."""
        first = len(self._jobs)
        self._jobs += jobs
        self._work_off(range(first, len(self._jobs)), processes)

    def results(self) -> Iterator[str]:
        """What each job returned, as it ends. One that failed, or whose process died, is tried once more, since memory
        may have been short. EOFError when `parent` has gone.
        """
        yield from self._answers()
        missing = [number for number in range(self.total) if number not in self.done]
        if missing:
            self._pipe = os.pipe()
            self._work_off(missing, 1)
            yield from self._answers()
        for number in range(self.total):
            if number not in self.done:
                self.failed.setdefault(number, "its process died")

    def _work_off(self, numbers: Sequence[int], processes: int) -> None:
        todo, fill = os.pipe()
        os.write(fill, b"".join(struct.pack("<I", number) for number in numbers))
        os.close(fill)
        for _ in range(min(processes, len(numbers))):
            child = os.fork()
            if not child:
                self._work(todo)
            self._children.append(child)
        os.close(todo)

    def _work(self, todo: int) -> None:
        parent = os.getppid()
        os.nice(5)
        while (packed := os.read(todo, 4)) and os.getppid() == parent:
            [number] = struct.unpack("<I", packed)
            try:
                answer = (number, True, self._jobs[number]())
            except BaseException as error:
                answer = (number, False, f"{type(error).__name__}: {error}"[:1000])
            os.write(self._pipe[1], msgspec.json.encode(answer) + b"\n")
        os._exit(0)

    def _answers(self) -> Iterator[str]:
        read, write = self._pipe
        os.close(write)
        rest = b""
        while True:
            ready, _, _ = select.select([read, self._parent], [], [])
            if read not in ready:
                raise EOFError("nobody waits for these kernels any more")
            piece = os.read(read, 1 << 16)
            if not piece:
                os.close(read)
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                number, done, text = msgspec.json.decode(line, type=tuple[int, bool, str])
                if done:
                    self.done.add(number)
                    self.failed.pop(number, None)
                    yield text
                else:
                    self.failed[number] = text
