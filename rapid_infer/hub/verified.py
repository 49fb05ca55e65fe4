"""What was verified in a directory that is not ours: noted in our own cache, so that it is read only once."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub.lockfile import Lock, lock_data, lock_of, replace_text, wrong_sizes
from rapid_infer.hub.store import verified_path
from rapid_infer.hub.verify import compare

logger = logging.getLogger(__name__)


def read_verified(source: str, repo: str, commit: str, directory: Path) -> Lock | None:
    """What `directory` held when it was verified; None when it never was."""
    data = _read(source, repo, commit, directory)
    return None if data is None else lock_of(data)


def unverified(directory: Path, lock: Lock, note: Callable[[str], None]) -> list[str]:
    """Why the files of `lock` in `directory` cannot be used; empty when all have their digests.

    Files are read only when one's size or modification time is not as noted; `note` is told before that.
    """
    try:
        if wrong := wrong_sizes(directory, lock.files):
            return wrong
        # Before reading: what changes meanwhile has another time afterwards.
        times = [(directory / entry.path).stat().st_mtime_ns for entry in lock.files]
        known = _read(lock.source, lock.repo, lock.commit, directory)
        if known is not None and lock_of(known).files == lock.files and known["times"] == times:
            return []
        size = sum(entry.size for entry in lock.files)
        note(f"verifying {lock.repo} in {directory}, {size / 1e9:.1f} GB, once")
        findings = compare(directory, lock.files)
    except (OSError, HubError) as error:
        return [f"cannot be read ({error})"]
    if wrong := [f"{found.path} differs from its digest" for found in findings if found.state != "equal"]:
        return sorted(wrong)
    _write(directory, lock, times)
    return []


def _read(source: str, repo: str, commit: str, directory: Path) -> dict[str, object] | None:
    try:
        data = json.loads(verified_path(source, repo, commit).read_text(encoding="utf-8"))
        lock_of(data)
        return data if data["directory"] == str(directory) else None
    except (OSError, ValueError, KeyError, TypeError, HubError):
        return None


def _write(directory: Path, lock: Lock, times: list[int]) -> None:
    path = verified_path(lock.source, lock.repo, lock.commit)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(
            path, json.dumps({**lock_data(lock), "directory": str(directory), "times": times}, indent=2) + "\n"
        )
    except OSError as error:
        logger.warning("%s: cannot be written (%s); %s is verified again at the next start", path, error, directory)
