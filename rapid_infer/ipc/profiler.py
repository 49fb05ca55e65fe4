"""Records steps of a running engine when it is asked to."""

from __future__ import annotations

import logging

from rapid_infer.ipc.messages import Profiled, StartProfile, StopProfile
from rapid_infer.profiling import profile

logger = logging.getLogger(__name__)


class Profiler:
    """At most one recording at a time. One that has made all its steps waits for `StopProfile`, which writes it."""

    def __init__(self) -> None:
        self._open: profile | None = None
        self._left: int | None = None

    def answer(self, message: StartProfile | StopProfile) -> Profiled:
        try:
            return self._start(message) if isinstance(message, StartProfile) else self._stop()
        except Exception as error:
            logger.exception("profiling failed")
            return Profiled("", f"profiling failed: {type(error).__name__}: {error}")

    def _start(self, message: StartProfile) -> Profiled:
        if self._open is not None:
            return Profiled("", "a profile is being recorded already; stop it first")
        self._open, self._left = profile(message.folder, message.prefix), message.num_steps
        self._open.__enter__()
        return Profiled(str(self._open.path))

    def _stop(self) -> Profiled:
        if self._open is None:
            return Profiled("", "no profile is being recorded; start one first")
        recording, self._open = self._open, None
        recording.__exit__()
        return Profiled(str(recording.path))

    def stepped(self) -> None:
        """After each step."""
        if self._open is not None and self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._open.stop()
