"""An engine process that another process has started, from the side of a further front."""

from __future__ import annotations

import contextlib
import os
import socket


class AttachedEngine:
    """What `AsyncLLM` asks of an `EngineProcess`, for an engine that listens at the Unix socket `path`. OSError."""

    def __init__(self, path: str) -> None:
        self.owner = os.getpid()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self.process = self

    @property
    def is_ours(self) -> bool:
        """False in a process that was forked from this one."""
        return os.getpid() == self.owner

    def poll(self) -> int | None:
        """Its process is another's child: only the socket says that it has ended."""
        return None

    def kill(self) -> None:
        """Not ours to kill."""

    def how_it_ended(self) -> str:
        return "the engine process closed its connection"

    def stop(self, grace: float) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()
