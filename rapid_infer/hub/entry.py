"""One file of a model on a hub: its path, size and digest; and how digests are computed."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from rapid_infer.errors import HubError

Algorithm = Literal["sha256", "git-sha1"]

CHUNK = 1 << 20
"""Bytes read at a time: large enough that hashing runs without Python's global lock."""

_DIGITS = {"sha256": 64, "git-sha1": 40}


class Hasher(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as a source lists it; `size` in bytes, `digest` in lower-case hex, `url` where its bytes are.

    "git-sha1" is the SHA-1 of git's blob: the digest that Hugging Face gives for files outside LFS.
    """

    path: str
    size: int
    algorithm: Algorithm
    digest: str
    url: str = ""


def checked_entry(path: str, size: int | None, algorithm: Algorithm, digest: str | None, url: str) -> FileEntry:
    """An entry out of what a hub said. HubError for a path that leaves its directory, no size or no digest.

    A listing comes over the network: nothing in it may choose where a file is written.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or any(c in path for c in "\\\0\n\r:"):
        raise HubError(f"file name {path!r}: got a name that leaves the model's directory; refused")
    if not isinstance(size, int) or size < 0:
        raise HubError(f"file {path!r}: got size {size!r} from the hub; expected a number of bytes")
    digest = (digest or "").lower()
    if len(digest) != _DIGITS[algorithm] or not set(digest) <= set("0123456789abcdef"):
        raise HubError(
            f"file {path!r}: got {algorithm} {digest!r} from the hub; expected {_DIGITS[algorithm]} hex digits, "
            "without which it cannot be verified"
        )
    return FileEntry(path, size, algorithm, digest, url)


def hasher(algorithm: Algorithm, size: int) -> Hasher:
    """A new hash of `size` bytes to come."""
    if algorithm == "sha256":
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def digests_of(path: Path, algorithms: Iterable[Algorithm]) -> dict[Algorithm, str]:
    """The file's digests, each byte read once. OSError when it cannot be read."""
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        hashes = {algorithm: hasher(algorithm, size) for algorithm in algorithms}
        feed(file, *hashes.values())
    return {algorithm: made.hexdigest() for algorithm, made in hashes.items()}


class _Readable(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...


def feed(file: _Readable, *hashes: Hasher) -> int:
    """Put the rest of `file` into `hashes`; returns its bytes."""
    buffer = memoryview(bytearray(CHUNK))
    total = 0
    while count := file.readinto(buffer):
        for made in hashes:
            made.update(buffer[:count])
        total += count
    return total
