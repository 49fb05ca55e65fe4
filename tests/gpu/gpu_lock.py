"""Lets test processes of one host share its GPUs, and one of them have these to itself."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(tempfile.gettempdir()) / f"rapid_infer-gpu-tests-{os.getuid()}.lock"


@contextmanager
def hold(alone: bool, path: Path = LOCK) -> Iterator[None]:
    """Wait for whoever has the GPUs alone; with `alone` for all others, too."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            # Closing would not do where a child process still has the file.
            fcntl.flock(file, fcntl.LOCK_UN)
