"""A reference becomes a verified directory: choose a hub, list, select, fill; one process at a time."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub.cache import file_lock
from rapid_infer.hub.choose import FALLBACK_SECONDS, LIST_SECONDS, PUBLIC, Endpoints, hub_order, open_source, within
from rapid_infer.hub.client_cache import find_listed
from rapid_infer.hub.contents import empty_files
from rapid_infer.hub.entry import FileEntry
from rapid_infer.hub.fill import fill, to_fetch
from rapid_infer.hub.lockfile import DIRECTORY_LOCK, Lock, listed, read_lock
from rapid_infer.hub.near import did_you_mean
from rapid_infer.hub.progress import Watcher
from rapid_infer.hub.reference import ModelRef
from rapid_infer.hub.selection import select
from rapid_infer.hub.source import Source, SourceError
from rapid_infer.hub.store import commit_dir, lock_path, other_commits, problems, recall, remember

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to download. `to` None: into the cache; `include` empty: what loading needs; `dry_run`: only plan it.

    `force`: replace files of another model, and files that were changed, in `to`. `unused`: directories that
    were found before any hub was asked, and why they cannot be used.
    """

    ref: ModelRef
    hub: str = "auto"
    to: Path | None = None
    include: tuple[str, ...] = ()
    endpoints: Endpoints = PUBLIC
    dry_run: bool = False
    force: bool = False
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Download:
    """What a download gave, or a dry run would: `files` are wanted, `fetched` the paths of those that had to come.

    `reason` says in words which hub was taken and why.
    """

    directory: Path
    source: str
    endpoint: str
    repo: str
    revision: str
    commit: str
    reason: str
    files: tuple[FileEntry, ...]
    fetched: tuple[str, ...]
    dry_run: bool = False


def download(wanted: Wanted, watcher: Watcher) -> Download:
    """Fetch `wanted` from the first hub that gives it; what is there already stays.

    The revision is asked for anew each time. HubError with every hub's reason when none gives it. A hub that takes too
    long or fails half-way is left for the next one; a full disk or a wrong pattern is not its fault and is raised.
    """
    names = hub_order(wanted.ref, wanted.hub)
    _check_owner(wanted)
    failed: list[str] = []
    for name in names:
        source = open_source(name, wanted.endpoints)
        try:
            return _from_source(source, wanted, watcher, names, failed)
        except SourceError as error:
            failed.append(str(error))
            if len(failed) < len(names):
                _tell(watcher, f"{error}; trying the next hub")
    advice = "check the name, the revision and the network"
    if len(names) == 1:
        other = "modelscope" if names[0] == "huggingface" else "huggingface"
        advice += f", or try {other} or a mirror"
    near = did_you_mean(wanted.ref.name) if wanted.ref.kind == "auto" else ""
    raise HubError(f"model {wanted.ref.name!r}: {'; '.join(failed)}; {advice}{near}")


@contextmanager
def only_writer(ref: ModelRef, to: Path | None, watcher: Watcher) -> Iterator[None]:
    """Keep other processes from downloading this model, or into this directory."""
    try:
        if to is not None:
            to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HubError(f"{to}: cannot make this directory ({error}); choose another one with --to") from error
    path = lock_path(ref.name) if to is None else to / DIRECTORY_LOCK
    with file_lock(path, on_wait=lambda: watcher.note(f"waiting for another process that downloads {ref.name}")):
        yield


def _from_source(
    source: Source, wanted: Wanted, watcher: Watcher, names: tuple[str, ...], failed: list[str]
) -> Download:
    ref = wanted.ref
    last = source.name == names[-1]
    seconds = LIST_SECONDS if last else FALLBACK_SECONDS
    commit, entries = within(seconds, lambda: _list(source, ref), f"{source.title} ({source.endpoint})")
    files = tuple(select(entries, wanted.include))
    if empty := empty_files(files):
        raise SourceError(
            f"{source.title} ({source.endpoint}): {ref.name}: lists {listed(empty)} with 0 bytes, which no model can "
            "be loaded from; the upload is damaged"
        )
    why = f"after {failed[-1]}" if failed else "the only one asked for" if last else "the first in order"
    reason = f"{ref.name} from {source.title} ({source.endpoint}): {why}"
    _tell(watcher, reason)
    revision = ref.revision or source.default_revision
    directory = wanted.to or commit_dir(source.name, ref.name, commit)
    lock = Lock(source.name, source.endpoint, ref.name, revision, commit, wanted.include or None, files)
    if wanted.to is None and not wanted.include and problems(directory):
        found = find_listed(lock, lambda text: _tell(watcher, text))
        if isinstance(found, tuple):
            return _in_place(*found, reason, wanted.dry_run)
        for line in dict.fromkeys([*wanted.unused, *found]):
            _tell(watcher, f"not used: {line}")
    if wanted.dry_run:
        fetched = [entry.path for entry in to_fetch(directory, lock)]
    else:
        place = (source.name, ref.name, revision)
        usable = (before := recall(*place)) is not None and not problems(before)
        if wanted.to is None and not usable:
            # Already now, so that offline what is missing can be named.
            remember(*place, commit)
        # Not for a user's own directory: what is changed there must not change the cache.
        donors = other_commits(ref.name, directory) if wanted.to is None else []
        fetched = fill(directory, lock, source, watcher, donors, replace=wanted.force or wanted.to is None)
        if wanted.to is None:
            remember(*place, commit)
    origin = (source.name, source.endpoint, ref.name, revision, commit)
    return Download(directory, *origin, reason, files, tuple(fetched), wanted.dry_run)


def _in_place(directory: Path, lock: Lock, reason: str, dry_run: bool) -> Download:
    """What the hub's own client has already."""
    if not dry_run:
        remember(lock.source, lock.repo, lock.revision, lock.commit)
    origin = (lock.source, lock.endpoint, lock.repo, lock.revision, lock.commit)
    return Download(directory, *origin, f"{reason}, and its client has it already", lock.files, (), dry_run)


def _check_owner(wanted: Wanted) -> None:
    """HubError when `to` holds another model: this download would delete its files."""
    if wanted.to is None or wanted.force or (lock := read_lock(wanted.to)) is None:
        return
    if lock.repo.casefold() != wanted.ref.name.casefold():
        raise HubError(
            f"{wanted.to}: got a directory that holds {lock.repo} ({len(lock.files)} files from an earlier download); "
            f"expected a new one or one of {wanted.ref.name}, since those files would be deleted; choose another "
            "directory, or delete them with --force"
        )


def _list(source: Source, ref: ModelRef) -> tuple[str, list[FileEntry]]:
    commit = source.resolve(ref)
    return commit, source.manifest(ref.at(commit))


def _tell(watcher: Watcher, text: str) -> None:
    logger.info("%s", text)
    watcher.note(text)
