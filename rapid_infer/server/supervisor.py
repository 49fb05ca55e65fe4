"""Several front processes over one engine: started, replaced when one dies, drained, and ended with the engine."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from rapid_infer.config import EngineArgs
from rapid_infer.ipc import messages
from rapid_infer.ipc.launch import GRACE, EngineProcess
from rapid_infer.ipc.messages import Died, Listen, Ready
from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import ChildProcess
from rapid_infer.server.front_process import FrontSetup, FrontStart
from rapid_infer.server.metrics import Metrics, row_bytes
from rapid_infer.server.run import SIGNALS, listen, ready_line
from rapid_infer.server.settings import ServerSettings
from rapid_infer.startup import locate

logger = logging.getLogger("rapid_infer.server")

_POLL = 0.1
_ALLOWED_DEATHS = 5
"""Of fronts, in a minute; with more, something is wrong that a new process does not mend."""

_LAST_ANSWERS = 3.0
"""Seconds for fronts to say that the engine is dead."""


class Supervisor:
    """`sock` holds the port; fronts bind it too once the model is loaded."""

    def __init__(self, model: str, engine_args: dict[str, Any], settings: ServerSettings, sock: socket.socket) -> None:
        self._settings = settings
        self._port: int = sock.getsockname()[1]
        # From here on the port is shared, among processes of this user.
        sock.close()
        self._sock = listen(settings.host, self._port, shared=True)
        args = EngineArgs.from_kwargs(**engine_args)
        checkpoint, entry = locate(model, args)
        self._tokenizer = None if args.skip_tokenizer_init else str(checkpoint.path)
        self._engine = EngineProcess(checkpoint.path, entry, args)
        self._channel = Channel(self._engine.sock)
        # They load what they need while the model is loaded.
        self._fronts = [self._start_front(index) for index in range(settings.front_processes)]
        self._deaths: deque[float] = deque()
        self._signals = 0

    def run(self) -> int:
        """Until a signal comes or it cannot go on; the exit code."""
        with tempfile.TemporaryDirectory(prefix="rapid-infer-", ignore_cleanup_errors=True) as folder:
            try:
                self._start(self._engine.wait_ready(), Path(folder))
                return self._watch()
            finally:
                self._end()

    def _start(self, ready: Ready, folder: Path) -> None:
        self._ready, self._folder = ready, folder
        (folder / "metrics").write_bytes(bytes(self._settings.front_processes * row_bytes()))
        self._channel.send(messages.encode(Listen(str(folder / "engine"))))
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        for index, one in enumerate(self._fronts):
            self._set_up(one, index)
        for one in self._fronts:
            if Channel(one.sock).receive() is None and not self._signals:
                logger.error("%s", one.how_it_ended())
        logger.info("%s", ready_line(self._settings, ready.info, self._sock))

    def _start_front(self, index: int) -> ChildProcess:
        child = ChildProcess(f"front process {index}", "rapid_infer.server.front_process")
        self._tell(child, FrontStart(self._settings, self._tokenizer))
        return child

    def _set_up(self, child: ChildProcess, index: int) -> None:
        engine, metrics = str(self._folder / "engine"), str(self._folder / "metrics")
        self._tell(child, FrontSetup(self._port, self._ready, engine, metrics, index))

    @staticmethod
    def _tell(child: ChildProcess, message: FrontStart | FrontSetup) -> None:
        # One that has died is found by `_watch`.
        with contextlib.suppress(OSError):
            Channel(child.sock).send(msgspec.msgpack.encode(message))

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        for one in self._fronts:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGTERM)

    def _watch(self) -> int:
        deadline: float | None = None
        while True:
            cause = self._engine_death()
            if cause is not None:
                logger.error("the engine has ended: %s", cause)
                self._wait_fronts(_LAST_ANSWERS)
                return 1
            if self._signals:
                deadline = deadline or time.monotonic() + self._settings.drain_timeout + GRACE
                if all(one.process.poll() is not None for one in self._fronts) or time.monotonic() > deadline:
                    return 0
            elif not self._replace_dead():
                return 1

    def _engine_death(self) -> str | None:
        """Waits a moment for the engine's last words; None while it lives."""
        poll = select.poll()
        poll.register(self._engine.sock, select.POLLIN)
        if not poll.poll(_POLL * 1000):
            return None
        try:
            payload = self._channel.receive()
        except OSError:
            payload = None
        if payload is None:
            return self._engine.how_it_ended()
        message = messages.from_engine(payload)
        return message.message if isinstance(message, Died) else None

    def _replace_dead(self) -> bool:
        """False when too many fronts have died."""
        for index, one in enumerate(self._fronts):
            if one.process.poll() is None:
                continue
            self._forget_in_flight(index)
            logger.error("%s; another one takes its place", one.how_it_ended())
            one.sock.close()
            now = time.monotonic()
            self._deaths.append(now)
            while self._deaths[0] < now - 60:
                self._deaths.popleft()
            if len(self._deaths) > _ALLOWED_DEATHS:
                logger.error("%d front processes have died within a minute: giving up", len(self._deaths))
                return False
            self._fronts[index] = self._start_front(index)
            self._set_up(self._fronts[index], index)
        return True

    def _forget_in_flight(self, index: int) -> None:
        """What a dead front had under way ends with it; the rest that it counted stays."""
        with (self._folder / "metrics").open("r+b") as file:
            Metrics(file.fileno(), self._settings.front_processes, index).forget_in_flight()

    def _wait_fronts(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(one.process.poll() is None for one in self._fronts):
            time.sleep(_POLL)

    def _end(self) -> None:
        for one in self._fronts:
            if one.process.poll() is None:
                one.process.terminate()
        self._wait_fronts(_LAST_ANSWERS)
        for one in self._fronts:
            one.stop(grace=0)
        with contextlib.suppress(OSError):
            self._channel.send(messages.encode(messages.Stop()))
        self._engine.stop(GRACE)
        self._sock.close()


def auto_fronts() -> int:
    """One for every four cores that this process may use: the engine and its libraries take the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // 4, 1), 8)
