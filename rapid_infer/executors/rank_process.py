"""One rank of several: `python -m rapid_infer.executors.rank_process FD`, where FD is its end of a socket.

It takes commands and plans from a ring, and answers phases over the socket and steps over a ring of results. Whatever
it raises it reports, and then it waits to be ended: its peers may be waiting for it in a collective, and would report
nothing but that it has gone. It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rapid_infer import errors
from rapid_infer.executors import rank_messages as messages
from rapid_infer.executors.rank_messages import (
    Allocate,
    Build,
    Done,
    Drain,
    Failed,
    Join,
    Leave,
    Profile,
    Profiled,
    Sample,
    Step,
    ToRank,
    Unload,
)
from rapid_infer.parallel.bus import Ring, SharedMemory, StatusBoard, wait_until
from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import take_over

CHECK_HIDDEN = "RAPID_INFER_CHECK_HIDDEN"
"""Set to 1, eager steps mix the hidden states into the checksum by which ranks are compared too."""

ENVIRONMENT = {
    # Machines may have NVLink multicast turned off or broken; nothing here needs it.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
}
PHASES = ("start", "load", "profile", "allocate", "capture", "step", "idle")


class Rank:
    """The main loop over the ring of plans."""

    def __init__(self, join: Join, fds: list[int], channel: Channel) -> None:
        import torch

        from rapid_infer.parallel import process_group
        from rapid_infer.parallel.providers import candidates
        from rapid_infer.parallel.select import select_comm

        plans, results, board, collective, stacks, *wake = fds
        self.number, self.ranks, self.channel = join.rank, join.ranks, channel
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        self.board = StatusBoard(SharedMemory(StatusBoard.size(join.ranks), board), join.ranks)
        self.plans = Ring(
            SharedMemory(Ring.size(join.plan_bytes, join.ranks), plans), join.plan_bytes, join.ranks, wake[:-1]
        )
        self.results = Ring(SharedMemory(Ring.size(join.result_bytes, 1), results), join.result_bytes, 1, wake[-1:])
        self.device = torch.device(join.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        process_group.join("127.0.0.1", join.port, join.rank, join.ranks, self.device)
        offered = candidates(self.device, join.rank, join.ranks, collective, self._entered)
        self.comm = select_comm(offered, join.rank, join.ranks, self.device)
        self.worker: Any = None
        self._pending: deque[Any] = deque()
        self._half: Any = None
        self._plan: Any = None
        self._depth = 1
        self._checks_hidden = os.environ.get(CHECK_HIDDEN) == "1"

    def _entered(self) -> None:
        self.board.collectives[self.number] += 1

    def _works(self, nbytes: int = 0) -> None:
        self.board.work[self.number] += 1

    @contextlib.contextmanager
    def _progress(self, total_bytes: int) -> Iterator[Callable[[int], None]]:
        from rapid_infer.loader.progress import silent, terminal_bar

        # One rank's bar for all of them.
        with (terminal_bar if self.number == 0 else silent)(total_bytes) as advance:

            def read(nbytes: int) -> None:
                self._works()
                advance(nbytes)

            yield read

    @property
    def phase(self) -> str:
        return PHASES[int(self.board.phase[self.number])]

    @phase.setter
    def phase(self, name: str) -> None:
        self.board.phase[self.number] = PHASES.index(name)

    def run(self) -> None:
        """Returns when told to leave; raises what a command raised."""
        while True:
            self.phase = "step" if self._pending else "idle"
            wait_until(self._has_work, lambda seconds: self.plans.block(self.number, seconds), lambda: None)
            payload = self.plans.read(self.number)
            if payload is None:
                self._collect()
                continue
            message = messages.to_rank(payload)
            if isinstance(message, Leave):
                return
            self._take(message)

    def _has_work(self) -> bool:
        return self.plans.has_message(self.number) or (bool(self._pending) and self._is_done(self._pending[0]))

    @staticmethod
    def _is_done(handle: Any) -> bool:
        return handle.done is None or handle.done.query()

    def _take(self, message: ToRank) -> None:
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, Sample):
            self.worker.runner.launch_sample(self._half, message.masks)
            self._pending.append(self._half)
            self._half = None
        elif isinstance(message, Drain):
            if self._half is not None:
                self._take(Sample(None))
            while self._pending:
                self._finish_oldest()
            if self.number == 0:
                self.results.write(message.mark, lambda: None)
        elif isinstance(message, Build):
            self._build(message)
        elif isinstance(message, Profile):
            self._profile()
        elif isinstance(message, Allocate):
            self.phase = "allocate"
            self.worker.allocate(message.num_blocks)
            self.phase = "capture"
            self.worker.capture()
            self._answer(Done("capture"))
        elif isinstance(message, Unload):
            if self.worker is not None:
                self.worker.close()
            self.worker, self._half = None, None
            self._pending.clear()
            self._answer(Done("unload"))

    def _answer(self, message: messages.FromRank) -> None:
        self.channel.send(messages.encode(message))

    def _build(self, message: Build) -> None:
        from rapid_infer.models.checkpoint import read_checkpoint
        from rapid_infer.parallel import ParallelState
        from rapid_infer.registry import load_target
        from rapid_infer.worker.worker import Worker

        self.phase = "load"
        config = message.config
        if config.cuda_graphs and not self.comm.capturable:
            raise errors.ConfigError(
                f"collectives over {self.comm.name}, all that these ranks have, cannot be recorded in a CUDA graph; "
                "set enforce_eager=True"
            )
        parallel = ParallelState(self.number, self.ranks, ep_size=config.parallel.expert_parallel_size, comm=self.comm)
        cls: Any = load_target(message.target)
        checkpoint = read_checkpoint(message.path)
        self.worker = Worker(cls, cls.read_config(checkpoint.hf_config), checkpoint, config, parallel, self.device)
        self.worker.build()
        if self.device.type == "cpu":
            # All layers of a long step may take longer than a rank may be silent; one of them will not.
            for module in self.worker.built.model.modules():
                module.register_forward_pre_hook(lambda module, args: self._works())
        self.worker.load(self._progress)
        self._depth = config.scheduler.queue_depth
        self._answer(Done("load"))

    def _profile(self) -> None:
        from rapid_infer.worker.build import plan_cache

        self.phase = "profile"
        plan, length = plan_cache(self.worker.config, self.worker.groups, self.worker.profile())
        report = self.worker.built.report
        self._answer(Profiled(tuple(plan.num_blocks), length, 0 if report is None else report.bytes_read))

    def _step(self, message: Step) -> None:
        while len(self._pending) >= self._depth:
            self._finish_oldest()
        self.phase = "step"
        self.board.steps[self.number] += 1
        runner = self.worker.runner
        if message.plan is not None:
            self._plan = messages.to_plan(message.plan)
        plan = replace(self._plan, step=message.step, max_seq_len=message.max_seq_len)
        if message.gated:
            self._half = runner.launch_forward(plan)
        elif not self._checks_hidden:
            self._pending.append(runner.launch(plan))
        else:
            handle = runner.launch_forward(plan)
            if handle.output is not None:
                self._mix(handle.output.hidden.float().cpu().numpy().tobytes())
            runner.launch_sample(handle)
            self._pending.append(handle)

    def _finish_oldest(self) -> None:
        wait_until(lambda: self._is_done(self._pending[0]), time.sleep, lambda: None)
        self._collect()

    def _mix(self, data: bytes) -> None:
        self.board.tokens[self.number] = zlib.crc32(data, int(self.board.tokens[self.number]))

    def _collect(self) -> None:
        result = self.worker.runner.collect(self._pending.popleft())
        self.comm.check()
        self._mix(result.token_ids.tobytes())
        self.board.collected[self.number] += 1
        graphs, seconds = self.worker.late_graphs
        self.board.late_graphs[self.number], self.board.late_us[self.number] = graphs, int(seconds * 1e6)
        if self.number == 0:
            self.results.write(messages.encode(result), lambda: None)


def _end_with_parent(sock: socket.socket) -> None:
    """Ends this process as soon as the other end of the socket is gone, whatever the main thread is at."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            # Nothing but the end is ever sent this way once a rank runs.
            while sock.recv(1, socket.MSG_PEEK):
                time.sleep(0.1)
        # Under a launcher, how the first process ended is what counts.
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def _failure(error: BaseException, rank: Rank | None) -> Failed:
    kind = next((k.__name__ for k in type(error).__mro__ if k.__module__ == errors.__name__), None)
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    lost = ("onnection closed", "onnection reset", "timed out", "Broken pipe", "DistBackendError")
    step = int(rank.board.steps[rank.number]) if rank else 0
    phase = rank.phase if rank else "start"
    trace = "".join(traceback.format_exception(error))
    return Failed(kind, text, trace, phase, step, any(word in f"{type(error).__name__} {text}" for word in lost))


def serve(sock: socket.socket) -> int:
    """Serve the process at the other end of the socket, whose first message says as what; returns the exit code."""
    payload, fds, _, _ = socket.recv_fds(sock, 1 << 16, 256)
    if not payload:
        return 0
    join = messages.to_rank(payload)
    assert isinstance(join, Join)
    _end_with_parent(sock)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(format=f"%(levelname)s rank {join.rank} %(name)s: %(message)s")
    logging.getLogger("rapid_infer").setLevel(join.log_level)
    channel, rank = Channel(sock), None
    try:
        rank = Rank(join, fds, channel)
        rank._answer(Done("start"))
        rank.run()
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.send(messages.encode(_failure(error, rank)))
        # The parent ends this process, or the thread that watches it does.
        while True:
            time.sleep(3600)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    # Taking the interpreter down with a process group and a model can take seconds, and nothing is left to be done.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(serve(take_over(int(sys.argv[1]))))
