"""Files that cannot be what their names say, though their digests are the hub's: its own copy is damaged."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from rapid_infer.hub.entry import FileEntry

NEVER_EMPTY = ("*.safetensors", "*.bin", "*.index.json", "config.json", "tokenizer.json", "tokenizer.model")


def empty_files(entries: Iterable[FileEntry]) -> list[str]:
    """The paths of files that have no bytes and cannot be used without."""
    return [
        entry.path
        for entry in entries
        if entry.size == 0 and any(fnmatchcase(entry.path.rpartition("/")[2], name) for name in NEVER_EMPTY)
    ]


def safetensors_fault(path: Path) -> str | None:
    """Why the header of a safetensors file does not fit its bytes: cut off, empty, or a pointer of git LFS."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return None
    except SafetensorError as error:
        return str(error)
