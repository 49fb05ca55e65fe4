"""Named spans over engine and worker code: ranges in a profiler's trace when on, one check of a global when off.

    with span("engine.schedule"):
        ...

Names are `<package>.<region>`. This module imports torch only when spans are turned on, so that host-side code, which
knows no torch, can carry them too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Opener = Callable[[str], AbstractContextManager[Any]]

# Shared by all spans that are off: a null context holds no state, so nested and concurrent use are fine.
_OFF: AbstractContextManager[Any] = nullcontext()
_open: Opener | None = None


def span(name: str) -> AbstractContextManager[Any]:
    """The `with` block is a range called `name` while spans are on."""
    return _OFF if _open is None else _open(name)


def traced(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: every call of the function is a span. Looks at call time whether spans are on."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return fn(*args, **kwargs)

        return call

    return decorate


def enabled() -> bool:
    return _open is not None


def enable() -> None:
    """Emit every span as a `torch.profiler.record_function` range, and as an NVTX range where CUDA is there."""
    import torch

    cuda = torch.cuda.is_available()
    record_function = torch.profiler.record_function

    @contextmanager
    def both(name: str) -> Iterator[None]:
        with torch.cuda.nvtx.range(name), record_function(name):
            yield

    _set(both if cuda else record_function)


def disable() -> None:
    _set(None)


@dataclass
class Duration:
    """A span by the host's clock, which does not wait for a GPU. `depth`: in how many others it lies."""

    name: str
    depth: int
    seconds: float = 0.0


@contextmanager
def durations() -> Iterator[list[Duration]]:
    """Inside, spans become durations, in the order in which they begin: for phases that run once, in one thread."""
    found: list[Duration] = []
    depth = 0

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        nonlocal depth
        duration = Duration(name, depth)
        found.append(duration)
        depth += 1
        started = time.perf_counter()
        try:
            yield
        finally:
            duration.seconds = time.perf_counter() - started
            depth -= 1

    before = _open
    _set(timed)
    try:
        yield found
    finally:
        _set(before)


class profile:
    """Context manager: spans and torch's profiler are on inside it; at its end a Chrome trace is written to `path`.

    `path` is `<output_dir>/<prefix>.trace.json`, with the process id before `.trace` where that file exists.
    `profiler` is torch's own, for `key_averages()`. `stop()` ends the recording early, so that a long run can be
    recorded in its first steps only.
    """

    def __init__(self, output_dir: str | Path, prefix: str = "rapid_infer") -> None:
        self.path = Path(output_dir) / f"{prefix}.trace.json"
        if self.path.exists():
            self.path = Path(output_dir) / f"{prefix}.{os.getpid()}.trace.json"
        self.profiler: Any = None
        self._before: Opener | None = None
        self._recording = False

    def __enter__(self) -> profile:
        import torch
        from torch.profiler import ProfilerActivity

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._before = _open
        enable()
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()
        self._recording = True
        return self

    def stop(self) -> None:
        """End the recording; a second call does nothing."""
        if self._recording:
            self._recording = False
            self.profiler.stop()
            _set(self._before)

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(self.path))


def _set(opener: Opener | None) -> None:
    global _open
    _open = opener
