"""Starts and ends an engine process from the front's side."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rapid_infer.config import EngineArgs
from rapid_infer.errors import ConfigError, EngineDeadError
from rapid_infer.ipc import messages
from rapid_infer.ipc.channel import Channel
from rapid_infer.ipc.messages import Ready, Start, StartFailed
from rapid_infer.registry import Entry

GRACE = 5.0
"""Seconds that an engine gets to end by itself."""

_EXIT_WAIT = 0.5


class EngineProcess:
    """A child process that loads a model, and this side's end of the socket to it. It may not be forked along."""

    def __init__(self, path: Path, entry: Entry, args: EngineArgs) -> None:
        """ConfigError for options that cannot be sent. Does not wait for the model."""
        level = logging.getLogger("rapid_infer").getEffectiveLevel()
        try:
            start = messages.encode(Start(str(path), entry, messages.changed_fields(args), level))
        except ValueError as error:
            raise ConfigError(f"an engine option cannot be used: {error}") from error
        self.owner = os.getpid()
        self.sock, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "rapid_infer.ipc.engine_process", str(theirs.fileno())]
        try:
            with theirs:
                # Held back until the child ignores it: an interrupt must not end it halfway through its imports.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    self.process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=_environment()
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self.sock.close()
            raise
        with contextlib.suppress(OSError):
            # A child that is gone already is found by wait_ready.
            Channel(self.sock).send(start)

    @property
    def is_ours(self) -> bool:
        """False in a process that was forked after this one started the engine."""
        return os.getpid() == self.owner

    def wait_ready(self) -> Ready:
        """Wait until the model is loaded.

        Raises the typed error that loading raised; EngineDeadError when the process ended without a word.
        """
        try:
            payload = Channel(self.sock).receive()
        except OSError:
            payload = None
        if payload is None:
            raise EngineDeadError(f"the engine did not start: {self.how_it_ended()}")
        message = messages.from_engine(payload)
        if isinstance(message, StartFailed):
            raise messages.unpack_failure(message)
        if not isinstance(message, Ready):
            raise EngineDeadError(f"the engine did not start: it sent {type(message).__name__}")
        return message

    def how_it_ended(self) -> str:
        """In words, for a process whose end of the socket is closed; one that is still there is killed."""
        name = f"the engine process (pid {self.process.pid})"
        try:
            code = self.process.wait(_EXIT_WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"{name} closed its connection and was killed"
        if code >= 0:
            return f"{name} ended with exit code {code}"
        try:
            return f"{name} was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"{name} was killed by signal {-code}"

    def stop(self, grace: float) -> None:
        """Wait `grace` seconds for its end, then kill it; frees the socket."""
        if self.is_ours:
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with contextlib.suppress(OSError):
            self.sock.close()


def _environment() -> dict[str, str]:
    """The engine finds the modules that this process finds, also those of a plugin in a script's own folder."""
    paths = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
