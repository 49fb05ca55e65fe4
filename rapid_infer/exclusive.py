"""Objects that several threads may call, one call at a time, and that a forked process may not."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from rapid_infer.errors import EngineDeadError, RequestError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Exclusive")

CLOSED = "the engine was closed; make a new one"

_GIVE_WAY = 1e-4
"""Seconds: longer than a waiting thread takes to wake up."""


def forked(owner: int) -> str:
    """Why the engine that process `owner` made is of no use in this process, which was forked from it."""
    return (
        f"this engine belongs to process {owner} and cannot be used in process {os.getpid()}, which was forked from "
        "it: threads and devices are not forked along; start processes by multiprocessing.get_context('spawn'), and "
        "make an engine in each"
    )


class Exclusive:
    """Base of such an object. Its `exclusive` methods wait for each other, and each begins with `_clear_away`."""

    def __init__(self) -> None:
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._callers: set[int] = set()

    @property
    def _ours(self) -> bool:
        """Whether there is something to end: not after `close()`, nor in a forked process."""
        return not self._closed and os.getpid() == self._process

    @property
    def _inside(self) -> bool:
        """Whether this thread is in an exclusive method already."""
        return self._owner == threading.get_ident() and self._lock.locked()

    def check_usable(self) -> None:
        """EngineDeadError after `close()` or in a forked process; RequestError from within a call of this thread."""
        if self._closed:
            raise EngineDeadError(CLOSED)
        if os.getpid() != self._process:
            raise EngineDeadError(forked(self._process))
        if self._inside:
            raise RequestError(
                "the engine was called from within one of its own calls, by a signal handler, a token mask or a "
                "finalizer; call it when that call has returned"
            )

    def _clear_away(self) -> None:
        """What a call before this one has left to be done."""
        raise NotImplementedError


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let threads take turns in this method and the object's other exclusive ones."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        self.check_usable()
        caller, others = threading.get_ident(), bool(self._callers)
        self._callers.add(caller)
        try:
            if others:
                # A thread that calls in a loop would take the lock again before one that waits for it has woken up.
                time.sleep(_GIVE_WAY)
            # By `with` alone: no interrupt comes between the taking and the block, which gives the lock back.
            with self._lock:
                self._owner = caller
                try:
                    if self._closed:
                        raise EngineDeadError(CLOSED)
                    self._clear_away()
                    return method(self, *args, **kwargs)
                finally:
                    self._owner = None
        finally:
            self._callers.discard(caller)

    return call
