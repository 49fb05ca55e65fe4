"""How long calls take that do nothing but wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def timed(wait: Callable[..., Any], waits: list[float]) -> Callable[..., Any]:
    """`wait`, whose seconds are added to `waits`, call by call."""

    def run(*args: Any) -> Any:
        started = time.perf_counter()
        result = wait(*args)
        waits.append(time.perf_counter() - started)
        return result

    return run
