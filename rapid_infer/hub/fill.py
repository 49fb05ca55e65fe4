"""A directory is brought to what a lock says: what is right stays, what is missing is fetched by several threads."""

import os
import queue
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub.cache import CACHE_VARIABLE
from rapid_infer.hub.entry import FileEntry, digests_of
from rapid_infer.hub.http import DEFAULT_POLICY, new_session
from rapid_infer.hub.lockfile import Lock, listed, read_lock, write_lock, wrong_sizes
from rapid_infer.hub.progress import Watcher
from rapid_infer.hub.source import Source
from rapid_infer.hub.transfer import Stopped, Transfer, part_path

WORKERS = 8
SPARE = 64 << 20
"""Bytes that must stay free on the disk."""


def fill(
    directory: Path, lock: Lock, source: Source, watcher: Watcher, donors: Sequence[Path] = (), *, replace: bool = False
) -> list[str]:
    """Make `directory` hold the files of `lock`, which carry their URLs; returns the paths that were fetched.

    Files that one of `donors`, directories with locks, has with the same digest are linked instead. `replace`: also
    files that no download put there, or that were changed since.

    The caller is the directory's only writer. HubError for such a file in the way, a full disk, or (a SourceError) a
    hub that does not give a file; what was fetched so far stays and is taken up again next time.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        old = read_lock(directory)
        missing, outdated = _compare(directory, lock, old, replace)
        links = _donated(missing, donors)
        _check_space(directory, [entry for entry in missing if entry.path not in links], outdated)
        for path in outdated:
            path.unlink(missing_ok=True)
        write_lock(directory, lock.joined(old))
        missing = [entry for entry in missing if not _link(links.get(entry.path), directory / entry.path)]
        if missing:
            watcher.plan(missing)
            _fetch(directory, missing, source, watcher)
        for entry in lock.files:
            path = directory / entry.path
            for leftover in path.parent.glob(f"{escape(path.name)}.*.part"):
                leftover.unlink(missing_ok=True)
    except OSError as error:
        raise HubError(
            f"{directory}: cannot write the model's files ({error}); expected a writable directory with enough space; "
            f"free some, or choose another one with --to or {CACHE_VARIABLE}"
        ) from error
    return [entry.path for entry in missing]


def to_fetch(directory: Path, lock: Lock) -> list[FileEntry]:
    """What `fill` would fetch, as far as sizes and the directory's own lock tell; reads and changes no file."""
    known = {} if (old := read_lock(directory)) is None else old.by_path()
    return [
        entry
        for entry in lock.files
        if wrong_sizes(directory, [entry]) or (entry.path in known and not _same(known[entry.path], entry))
    ]


def _same(one: FileEntry, other: FileEntry) -> bool:
    return (one.algorithm, one.digest) == (other.algorithm, other.digest)


def _compare(directory: Path, lock: Lock, old: Lock | None, replace: bool) -> tuple[list[FileEntry], list[Path]]:
    """The entries that are not there, and the files of an earlier download that must go."""
    ours = {} if old is None else old.by_path()
    missing: list[FileEntry] = []
    outdated: list[str] = []
    for entry in lock.files:
        path = directory / entry.path
        if not path.exists():
            missing.append(entry)
            continue
        known = ours.get(entry.path)
        if known is not None and _same(known, entry) and not wrong_sizes(directory, [entry]):
            continue
        if _is(path, entry):
            continue
        missing.append(entry)
        outdated.append(entry.path)
    if old is not None and lock.joined(old) is lock:
        outdated += [path for path in ours if path not in lock.by_path() and (directory / path).exists()]
    kept = [path for path in outdated if path not in ours or not _is(directory / path, ours[path])]
    if kept and not replace:
        raise HubError(
            f"{directory}: got other files in the way: {listed(kept)}; they differ from the hub's, and are not from an "
            "earlier download or were changed since; move them away, choose another directory, or replace them with "
            "--force"
        )
    return missing, [directory / path for path in outdated]


def _is(path: Path, entry: FileEntry) -> bool:
    """Whether the file at `path` has the bytes of `entry`; reads them when it has as many."""
    same_size = path.is_file() and path.stat().st_size == entry.size
    return same_size and digests_of(path, [entry.algorithm])[entry.algorithm] == entry.digest


def _donated(missing: Sequence[FileEntry], donors: Sequence[Path]) -> dict[str, Path]:
    """The missing paths that a donor has under some name, and where."""
    there: dict[tuple[str, str], Path] = {}
    for donor in donors if missing else ():
        with suppress(HubError):  # a lock that cannot be read is not this download's affair
            lock = read_lock(donor)
            for entry in () if lock is None else lock.files:
                if not wrong_sizes(donor, [entry]):
                    there.setdefault((entry.algorithm, entry.digest), donor / entry.path)
    keys = {entry.path: (entry.algorithm, entry.digest) for entry in missing}
    return {path: there[key] for path, key in keys.items() if key in there}


def _link(there: Path | None, target: Path) -> bool:
    if there is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(there, target)
    except OSError:  # not all file systems have links
        return False
    return True


def _check_space(directory: Path, missing: Sequence[FileEntry], outdated: Sequence[Path]) -> None:
    needed = 0
    for entry in missing:
        part = part_path(directory, entry)
        needed += entry.size - (min(part.stat().st_size, entry.size) if part.exists() else 0)
    free = shutil.disk_usage(directory).free + sum(path.stat().st_size for path in outdated)
    if needed and needed + SPARE > free:
        raise HubError(
            f"{directory}: got {free / 1e9:.1f} GB of free space; expected {(needed + SPARE) / 1e9:.1f} GB for "
            f"{len(missing)} files; free some, or choose another disk with --to or {CACHE_VARIABLE}"
        )


def _fetch(directory: Path, missing: Sequence[FileEntry], source: Source, watcher: Watcher) -> None:
    """Fetch all; the first failure stops the others and is raised. So does an interrupt."""
    headers = source.headers()
    stop = threading.Event()
    waiting: queue.SimpleQueue[FileEntry] = queue.SimpleQueue()
    for entry in missing:
        waiting.put(entry)
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            with new_session() as session:
                while not stop.is_set():
                    entry = waiting.get_nowait()
                    Transfer(entry, directory, session, headers, stop, watcher.advance, DEFAULT_POLICY).run()
                    watcher.finish(entry.path)
        except (queue.Empty, Stopped):
            outcomes.put(None)
        except BaseException as error:
            outcomes.put(error)

    # Daemons: a thread that waits for a dead server must not keep an interrupted process alive.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(WORKERS, len(missing)))]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            if (failure := outcomes.get()) is not None:
                raise failure
    finally:
        stop.set()
        deadline = time.monotonic() + 1
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
