"""`rapid-infer.lock.json`: what a model directory holds, where it came from, and every file's digest.

It is written before the first file, and a file takes its name only when its digest is right. So a directory whose
files all have the sizes that its lock names is complete and was verified when it was made.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rapid_infer.errors import HubError
from rapid_infer.hub.contents import empty_files
from rapid_infer.hub.entry import FileEntry, checked_entry

LOCK_NAME = "rapid-infer.lock.json"
DIRECTORY_LOCK = ".rapid-infer.lock"
_FORMAT = 1
_SHOWN = 5
_FIELDS = ("source", "endpoint", "repo", "revision", "commit")


@dataclass(frozen=True, slots=True)
class Lock:
    """`include` None: the default choice of files, with which a model can be loaded."""

    source: str
    endpoint: str
    repo: str
    revision: str
    commit: str
    include: tuple[str, ...] | None
    files: tuple[FileEntry, ...]

    @property
    def ref(self) -> str:
        """The reference with which `download` brings these files again."""
        return f"{'hf' if self.source == 'huggingface' else 'ms'}:{self.repo}@{self.revision}"

    def by_path(self) -> dict[str, FileEntry]:
        return {entry.path: entry for entry in self.files}

    def joined(self, other: "Lock | None") -> "Lock":
        """This lock, and the files that `other` has of the same commit."""
        if other is None or (other.source, other.repo, other.commit) != (self.source, self.repo, self.commit):
            return self
        files = {**other.by_path(), **self.by_path()}
        both = (
            None
            if self.include is None or other.include is None
            else tuple(dict.fromkeys(other.include + self.include))
        )
        return Lock(self.source, self.endpoint, self.repo, self.revision, self.commit, both, tuple(files.values()))


def read_lock(directory: Path) -> Lock | None:
    """The directory's lock; None when it has none. HubError when it cannot be used."""
    path = directory / LOCK_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise HubError(f"{path}: got format {data['format']!r}; expected {_FORMAT}; use a newer rapid-infer")
        return lock_of(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HubError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); expected what `rapid-infer download` wrote; "
            "remove it and download again"
        ) from error


def write_lock(directory: Path, lock: Lock) -> None:
    """Put `lock` into the directory, all of it or nothing."""
    replace_text(directory / LOCK_NAME, json.dumps(lock_data(lock), indent=2) + "\n")


def lock_data(lock: Lock) -> dict[str, Any]:
    """`lock` for JSON; `lock_of` reads it. URLs, which may be signed, are left out."""
    data = {"format": _FORMAT, **asdict(lock)}
    data["files"] = [{"path": f.path, "size": f.size, "algorithm": f.algorithm, "digest": f.digest} for f in lock.files]
    return data


def lock_of(data: Any) -> Lock:
    """HubError, KeyError, TypeError or ValueError for anything that `lock_data` did not make."""
    files = tuple(checked_entry(f["path"], f["size"], f["algorithm"], f["digest"], "") for f in data["files"])
    include = None if data["include"] is None else tuple(data["include"])
    source, endpoint, repo, revision, commit = (str(data[name]) for name in _FIELDS)
    return Lock(source, endpoint, repo, revision, commit, include, files)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that no reader ever sees half of it."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def is_ours(path: str) -> bool:
    """Whether a path is one that downloading itself uses. A repository may hold one, uploaded with a directory."""
    name = path.rpartition("/")[2]
    return name in (LOCK_NAME, DIRECTORY_LOCK) or name.endswith(".part")


def wrong_sizes(directory: Path, files: Sequence[FileEntry]) -> list[str]:
    """What is missing, one line a file; empty when every file is there at its size. Reads no file."""
    found = []
    for entry in files:
        try:
            size = (directory / entry.path).stat().st_size
        except OSError:
            found.append(f"{entry.path} is missing")
            continue
        if size != entry.size:
            found.append(f"{entry.path} has {size} bytes where {entry.size} are expected")
    # Locks that older versions wrote may say so.
    return found + [f"{path} is empty" for path in empty_files(files)]


def listed(lines: list[str]) -> str:
    """`lines` in one, the first few of them."""
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more
