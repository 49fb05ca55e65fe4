"""How test processes share GPUs; locks of two open files exclude each other within a process, too."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from gpu_lock import hold


def free_for(kind: int, path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.mark.parametrize("alone", [False, True])
def test_many_share_and_one_is_alone(alone: bool, tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def uses() -> tuple[bool, bool]:
        return free_for(fcntl.LOCK_SH, path), free_for(fcntl.LOCK_EX, path)

    with hold(alone, path):
        assert uses() == (not alone, False)
    assert uses() == (True, True)
