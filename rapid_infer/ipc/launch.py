"""Starts an engine process from the front's side, and waits for its model."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from rapid_infer.config import EngineArgs
from rapid_infer.errors import ConfigError, EngineDeadError
from rapid_infer.ipc import messages
from rapid_infer.ipc.messages import Ready, Start, StartFailed
from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import ChildProcess
from rapid_infer.registry import Entry

GRACE = 5.0
"""Seconds that an engine gets to end by itself."""


class EngineProcess(ChildProcess):
    """A child process that loads a model, and this side's end of the socket to it."""

    module = "rapid_infer.ipc.engine_process"

    def __init__(self, path: Path, entry: Entry, args: EngineArgs) -> None:
        """ConfigError for options that cannot be sent. Does not wait for the model."""
        level = logging.getLogger("rapid_infer").getEffectiveLevel()
        try:
            start = messages.encode(Start(str(path), entry, args, level))
        except ValueError as error:
            raise ConfigError(f"an engine option cannot be used: {error}") from error
        super().__init__("the engine process", self.module)
        with contextlib.suppress(OSError):
            # A child that is gone already is found by wait_ready.
            Channel(self.sock).send(start)

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
