"""Starts ranks, watches them, and ends them all when one fails or gets stuck; says which one, where and why."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from rapid_infer import errors
from rapid_infer.errors import EngineDeadError, RapidInferError
from rapid_infer.executors import rank_messages as messages
from rapid_infer.executors.external import ExternalRank
from rapid_infer.executors.rank_messages import Done, Drain, Failed, FromRank, Join, Leave, ToRank
from rapid_infer.executors.rank_process import PHASES
from rapid_infer.parallel.bus import Ring, SharedMemory, StatusBoard, wait_until
from rapid_infer.parallel.shm import ShmComm
from rapid_infer.processes.channel import FrameError, FrameReader
from rapid_infer.processes.launch import ChildProcess

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

_MODULE = "rapid_infer.executors.rank_process"
PLAN_BYTES, RESULT_BYTES = 32 << 20, 8 << 20
STUCK_SECONDS = float(os.environ.get("RAPID_INFER_RANK_TIMEOUT", "12"))
"""Without any rank getting on, the job is stuck. One that computes on a CPU while it starts gets ten times as long."""

START_SECONDS = 300.0
_SETTLE = 1.0
_STACK_WAIT = 0.5
_GRACE = 4.0
_CHECKS = 0.2

M = TypeVar("M", bound=FromRank)


class RankGroup:
    """`size` processes that form one process group; a model after another may be run on them.

    `devices`: one for each rank. `external`: ranks 1 and up, where a launcher has started them.
    EngineDeadError, or the typed error that a rank raised, from every call once a rank has failed; all ranks are ended
    then.
    """

    def __init__(
        self,
        size: int,
        devices: Sequence[str],
        threads: int | None = None,
        external: Sequence[ExternalRank] = (),
    ) -> None:
        from rapid_infer.parallel.process_group import host_store

        self.size = size
        self._failure: RapidInferError | None = None
        self._on_failure: Callable[[RapidInferError], object] | None = None
        self._answers: list[SimpleQueue[FromRank]] = [SimpleQueue() for _ in range(size)]
        self._reports: dict[int, Failed | str] = {}
        self._closed = self._leaving = False
        self._drains = 0
        self._store: dist.TCPStore | None = host_store(size)
        wake = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(size + 1)]
        plans = SharedMemory(Ring.size(PLAN_BYTES, size))
        results = SharedMemory(Ring.size(RESULT_BYTES, 1))
        board = SharedMemory(StatusBoard.size(size))
        collective = SharedMemory(ShmComm.bytes_needed(size))
        self._stacks = [os.memfd_create("stack", os.MFD_CLOEXEC) for _ in range(size)]
        self._wake, self._collective = wake, collective
        self.plans = Ring(plans, PLAN_BYTES, size, wake[:size])
        self.results = Ring(results, RESULT_BYTES, 1, wake[size:])
        self.board = StatusBoard(board, size)
        level = logging.getLogger("rapid_infer").getEffectiveLevel()
        env = {}
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        if len(set(devices)) < size:
            # Two ranks that were put on one GPU by mistake are to be refused.
            env["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self.children: list[ChildProcess | ExternalRank] = []
        try:
            for rank, device in enumerate(devices):
                child = external[rank - 1] if rank and external else ChildProcess(f"rank {rank}", _MODULE, env=env)
                self.children.append(child)
                join = Join(rank, size, self._store.port, device, level, PLAN_BYTES, RESULT_BYTES)
                fds = [plans.fd, results.fd, board.fd, collective.fd, self._stacks[rank], *wake]
                socket.send_fds(child.sock, [messages.encode(join)], fds)
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="ranks")
            self._watcher.start()
            self.answers(Done, START_SECONDS)
        except BaseException:
            self.close(0)
            raise

    def send(self, message: ToRank) -> None:
        """To all ranks, in order, without waiting for any."""
        self.check()
        self.plans.write(messages.encode(message), self.check)

    def answers(self, kind: type[M], limit: float | None = None) -> list[M]:
        """One from each rank. `limit`: seconds until that is an error, beside being stuck."""
        stuck, began = _Stuck(self), time.monotonic()
        found: list[M] = []
        for queue in self._answers:
            while True:
                with contextlib.suppress(Empty):
                    answer = queue.get(timeout=_CHECKS)
                    assert isinstance(answer, kind), answer
                    found.append(answer)
                    break
                self.check()
                if limit is None:
                    stuck.check()
                elif time.monotonic() - began > limit:
                    self.end_stuck(limit)
        return found

    def result(self) -> bytes:
        """The oldest result that has not been read; waits for it."""
        self._wait_until(lambda: self.results.has_message(0), lambda seconds: self.results.block(0, seconds))
        payload = self.results.read(0)
        assert payload is not None
        return payload

    def _wait_until(self, ready: Callable[[], bool], block: Callable[[float], object]) -> None:
        """Raises when a rank fails meanwhile, or none gets on."""
        stuck = _Stuck(self)

        def check() -> None:
            self.check()
            stuck.check()

        wait_until(ready, block, check)

    def drain(self) -> None:
        """Wait until all steps are done, and drop the results that nobody has read."""
        self._drains += 1
        mark = b"drain %d" % self._drains
        self.send(Drain(mark))
        while self.result() != mark:
            pass
        self.check_agreement()

    def check_agreement(self) -> None:
        """EngineDeadError when ranks have chosen different tokens, which nothing should ever make them do."""
        self._wait_until(lambda: len(set(self.board.collected.tolist())) == 1, time.sleep)
        sums = self.board.tokens.tolist()
        if len(set(sums)) > 1:
            self._fail(EngineDeadError(f"ranks have chosen different tokens: checksums {sums}"))
            self.check()

    def check(self) -> None:
        """Raises what ended the ranks, if anything has."""
        if self._failure is not None:
            # A new one each time: a traceback grows with every raise.
            raise type(self._failure)(str(self._failure))
        if self._closed:
            raise EngineDeadError("the ranks have been ended")

    @property
    def failed(self) -> bool:
        return self._failure is not None or self._closed

    def _watch(self) -> None:
        """The watching thread: hands on answers, and ends all ranks when one fails or goes."""
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(self.children):
                selector.register(child.sock, selectors.EVENT_READ, (rank, FrameReader()))
            deadline: float | None = None
            while selector.get_map():
                timeout = None if deadline is None else max(deadline - time.monotonic(), 0)
                ready = selector.select(timeout)
                if self._leaving:
                    return
                for key, _ in ready:
                    rank, reader = key.data
                    if not self._read(rank, reader, key.fileobj):
                        selector.unregister(key.fileobj)
                if self._reports and deadline is None:
                    # A healthy rank may go because of another, and be seen first.
                    deadline = time.monotonic() + _SETTLE
                if deadline is not None and time.monotonic() >= deadline:
                    self._fail(self._first_cause())
                    return

    def _read(self, rank: int, reader: FrameReader, sock: Any) -> bool:
        """False at the end of the stream."""
        try:
            data = sock.recv(1 << 16)
            frames = reader.feed(data)
        except (OSError, FrameError):
            data, frames = b"", []
        for payload in frames:
            message = messages.from_rank(payload)
            if isinstance(message, Failed):
                self._reports[rank] = message
            else:
                self._answers[rank].put(message)
        if not data:
            self._reports.setdefault(rank, self.children[rank].how_it_ended())
        return bool(data)

    def _first_cause(self) -> RapidInferError:
        """A rank's own error before a death, and a death before an error about a lost connection."""

        def order(item: tuple[int, Failed | str]) -> tuple[int, int]:
            report = item[1]
            return (
                0 if isinstance(report, Failed) and not report.connection else 1 if isinstance(report, str) else 2,
                item[0],
            )

        rank, report = min(self._reports.items(), key=order)
        if isinstance(report, str):
            steps = self.board.steps[rank]
            return EngineDeadError(f"{report} at step {steps}, in phase {self.phase_of(rank)}; all ranks were ended")
        kind = getattr(errors, report.kind or "", None)
        if isinstance(kind, type) and issubclass(kind, RapidInferError):
            return kind(f"rank {rank}: {report.text}")
        return EngineDeadError(
            f"rank {rank} raised in phase {report.phase}, step {report.step}: {report.text}\n{report.traceback}"
        )

    def phase_of(self, rank: int) -> str:
        return PHASES[self.board.snapshot()[rank][0]]

    def end_stuck(self, seconds: float) -> None:
        """Ends all ranks and raises which of them is behind, with its stack."""
        if self._failure is None and not self._reports:
            rank = behind(self.board.snapshot())[0]
            steps, collectives = self.board.steps[rank], self.board.collectives[rank]
            where = f"rank {rank} is behind, at step {steps}, collective {collectives}, in phase {self.phase_of(rank)}"
            state = self._stack(rank)
            self._fail(EngineDeadError(f"no rank got on for {seconds:.0f} s: {where}; all ranks were ended. {state}"))
        else:
            # The watching thread has something better to say.
            time.sleep(_SETTLE + _STACK_WAIT)
        self.check()

    def _stack(self, rank: int) -> str:
        """What the rank is at, as its own fault handler says it."""
        pid = self.children[rank].process.pid
        if process_state(pid) in ("T", "t"):
            return "The process is stopped (by SIGSTOP or a debugger)."
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(_STACK_WAIT)
            size = os.fstat(self._stacks[rank]).st_size
            text = os.pread(self._stacks[rank], size, 0).decode(errors="replace").strip()
            if text:
                return f"Its stack:\n{text}"
        return "It gave no stack."

    def on_failure(self, call: Callable[[RapidInferError], object]) -> None:
        """`call(error)`, in any thread, when a rank fails, also while nobody waits for one."""
        self._on_failure = call

    def _fail(self, error: RapidInferError) -> None:
        self._failure = error
        if self._on_failure is not None:
            self._on_failure(error)
        for child in self.children:
            with contextlib.suppress(OSError):
                child.process.kill()

    def close(self, grace: float = _GRACE) -> None:
        """Let the ranks leave, or end them; frees all that they shared."""
        if self._closed or (self.children and not self.children[0].is_ours):
            return
        healthy = self._failure is None and not self._reports and grace > 0
        self._leaving = True
        if healthy:
            with contextlib.suppress(RapidInferError):
                self.plans.write(messages.encode(Leave()), self.check)
        self._closed = True
        until = time.monotonic() + (grace if healthy else 0)
        for child in self.children:
            if not healthy:
                with contextlib.suppress(OSError):
                    child.process.kill()
            child.stop(max(until - time.monotonic(), 0))
        self._store = None
        self.plans.close()
        self.results.close()
        self.board.close()
        self._collective.close()
        for fd in (*self._wake, *self._stacks):
            os.close(fd)


class _Stuck:
    """Notices that no rank gets on. One that is behind while it starts, and uses its CPU, gets on, for a while."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._seen: Any = None
        self._since = self._looked = time.monotonic()
        self._moved = self._since

    def check(self) -> None:
        now = time.monotonic()
        if now - self._looked < _CHECKS:
            return
        self._looked = now
        snapshot = self._group.board.snapshot()
        late = behind(snapshot)
        # In a step every layer counts as work; a start imports, compiles and repacks without a word.
        starting = [rank for rank in late if self._group.phase_of(rank) not in ("step", "idle")]
        used = tuple(cpu_seconds(self._group.children[rank].process.pid) for rank in starting)
        seen = (snapshot, used)
        if self._seen is None or seen[0] != self._seen[0]:
            self._moved = now
        if seen != self._seen:
            self._since = now
        self._seen = seen
        if now - self._since > STUCK_SECONDS:
            self._group.end_stuck(now - self._since)
        if now - self._moved > 10 * STUCK_SECONDS:
            self._group.end_stuck(now - self._moved)


def behind(snapshot: tuple[tuple[int, ...], ...]) -> list[int]:
    """The ranks that the others wait for: those with the fewest steps, and of these the fewest collectives."""
    least = min(place[1:3] for place in snapshot)
    return [rank for rank, place in enumerate(snapshot) if place[1:3] == least]


def _stat(pid: int) -> list[str]:
    # The name, in parentheses, may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """As the kernel says it: "R", "S", "T" for stopped, ...; "" when it is gone."""
    try:
        return _stat(pid)[0]
    except OSError:
        return ""


def cpu_seconds(pid: int) -> int:
    """Whole seconds of processor time; 0 when it is gone."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK")
