"""One file: fetched in as many attempts as it takes, hashed on the way, named only when its digest is right."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, BinaryIO

from rapid_infer.hub.contents import safetensors_fault
from rapid_infer.hub.entry import FileEntry, feed, hasher
from rapid_infer.hub.http import Fault, Policy, Refused, ranged_get
from rapid_infer.hub.source import SourceError

if TYPE_CHECKING:
    from requests import Session

PROGRESS = 1 << 16
"""An attempt that brings fewer new bytes than this counts as none, or a server could go on for ever."""

Advance = Callable[[str, int], None]


class Stopped(Exception):
    """The transfer was asked to stop; what is on disk can be resumed."""


def part_path(directory: Path, entry: FileEntry) -> Path:
    """Where a file is while it grows. The digest in the name keeps it apart from other versions of the file."""
    path = directory / entry.path
    return path.with_name(f"{path.name}.{entry.digest[:16]}.part")


class Transfer:
    """Brings one entry into `directory`. `advance(path, size)`: how many bytes of it are there now."""

    def __init__(
        self,
        entry: FileEntry,
        directory: Path,
        session: "Session",
        headers: Mapping[str, str],
        stop: Event,
        advance: Advance,
        policy: Policy,
    ) -> None:
        self.entry = entry
        self._target = directory / entry.path
        self._part = part_path(directory, entry)
        self._session = session
        self._headers = headers
        self._stop = stop
        self._advance = advance
        self._policy = policy
        self._offset = 0
        self._best = 0

    def run(self) -> None:
        """Fetch, verify and name the file. SourceError when the hub does not give it, Stopped, OSError."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        idle = wrong = 0
        with open(os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
            self._open(file)
            while True:
                best = self._best
                try:
                    if self._offset < self.entry.size:
                        self._receive(file)
                    actual = self._hash.hexdigest()
                    if actual == self.entry.digest:
                        os.fsync(file.fileno())
                        break
                    wrong += 1
                    self._restart(file)
                    if wrong >= self._policy.mismatches:
                        self._part.unlink()
                        raise SourceError(
                            f"{self.entry.path}: got {self.entry.algorithm} {actual} where {self.entry.digest} is "
                            f"expected, {wrong} times; the file on the hub is damaged, or something on the way "
                            "changes it: try another hub or mirror"
                        )
                    self._pause(self._delay(wrong))
                except Fault as fault:
                    idle = 0 if self._best - best >= PROGRESS and not fault.restart else idle + 1
                    if fault.restart:
                        self._restart(file)
                    if idle >= self._policy.attempts:
                        raise SourceError(
                            f"{self.entry.path}: {fault}; given up after {idle} attempts without progress at "
                            f"{self._offset} of {self.entry.size} bytes; run it again to resume"
                        ) from fault
                    waited = self._delay(idle) if fault.wait is None else min(fault.wait, self._policy.max_retry_after)
                    self._pause(waited)
                except Refused as refused:
                    raise SourceError(f"{self.entry.path}: {refused}") from refused
        if self._target.suffix == ".safetensors" and (damage := safetensors_fault(self._part)) is not None:
            self._part.unlink()
            raise SourceError(
                f"{self.entry.path}: got a damaged safetensors file of {self.entry.size} bytes ({damage}) with the "
                "digest that the hub lists; the hub's own copy is damaged: try another hub or revision"
            )
        self._part.replace(self._target)

    def _open(self, file: BinaryIO) -> None:
        """Take over what an earlier run left."""
        self._hash = hasher(self.entry.algorithm, self.entry.size)
        if os.fstat(file.fileno()).st_size > self.entry.size:
            file.truncate(0)
        self._offset = self._best = feed(file, self._hash)  # type: ignore[arg-type]
        self._advance(self.entry.path, self._offset)

    def _restart(self, file: BinaryIO) -> None:
        file.seek(0)
        file.truncate(0)
        self._hash = hasher(self.entry.algorithm, self.entry.size)
        self._offset = 0
        self._advance(self.entry.path, 0)

    def _receive(self, file: BinaryIO) -> None:
        """One GET. Fault unless the file is whole afterwards."""
        size = self.entry.size
        with ranged_get(self._session, self.entry.url, self._headers, self._offset, size, self._policy) as body:
            if body.start != self._offset:
                self._restart(file)
            since, mark = self._offset, time.monotonic()
            for data in body.chunks():
                if self._stop.is_set():
                    raise Stopped
                if (now := time.monotonic()) - mark > self._policy.slow_time:
                    if self._offset - since < PROGRESS:
                        raise Fault(f"{body.host} sends almost nothing")
                    since, mark = self._offset, now
                if self._offset + len(data) > size:
                    raise Fault(f"{body.host} sent more than the {size} bytes that are expected", restart=True)
                _write_all(file, data)
                self._hash.update(data)
                self._offset += len(data)
                self._best = max(self._best, self._offset)
                self._advance(self.entry.path, self._offset)
                if self._offset == size:
                    return
        raise Fault(f"{body.host} ended after {self._offset} of {size} bytes")

    def _delay(self, failures: int) -> float:
        return min(self._policy.first_delay * 2 ** max(0, failures - 1), self._policy.max_delay)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
