"""The digests of a directory's files against its lock, or against what a hub lists."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rapid_infer.errors import HubError
from rapid_infer.hub.choose import PUBLIC, Endpoints, hub_order, is_offline, open_source
from rapid_infer.hub.entry import FileEntry, digests_of
from rapid_infer.hub.lockfile import LOCK_NAME, is_ours, read_lock
from rapid_infer.hub.reference import ModelRef
from rapid_infer.hub.selection import select

State = Literal["equal", "differs", "missing", "extra", "absent"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One file. "extra" is here alone and "absent" there alone: differences that say nothing about a file."""

    path: str
    state: State
    size: int
    algorithm: str = ""
    expected: str = ""
    actual: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """`against`: what the files were compared with; `findings` in the order of paths."""

    directory: Path
    against: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.state in ("differs", "missing") for finding in self.findings)


def verify(
    directory: Path,
    *,
    against: str | None = None,
    endpoints: Endpoints = PUBLIC,
    watch: Callable[[Finding], None] = lambda finding: None,
) -> Verification:
    """Read every file of `directory` once and compare its digest; `watch` is told each result.

    Without `against`, with the directory's lock and without network; else with a hub's listing, in which a file counts
    as missing when the lock, or without one the default choice, has it. HubError when there is nothing to compare with.
    """
    if not directory.is_dir():
        raise HubError(f"{directory}: got no directory; expected one that `rapid-infer download` made")
    here = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    here = {path for path in here if not is_ours(path) and not path.startswith(".")}
    wanted: Sequence[FileEntry]
    absent: set[str] = set()
    lock = read_lock(directory)
    if against is None:
        if lock is None:
            raise HubError(
                f"{directory}: got no {LOCK_NAME}; expected one to compare with; name a source instead, such as "
                "--against hf:org/name"
            )
        name, wanted = f"{lock.ref} at {lock.commit}", lock.files
    else:
        name, listed = _listing(against, endpoints)
        chosen = {entry.path for entry in select(listed)}
        due = here | (chosen if lock is None else lock.by_path().keys())
        wanted = [entry for entry in listed if entry.path in due]
        absent = chosen - due
    findings = compare(directory, wanted, watch)
    findings += [Finding(path, "extra", 0) for path in here - {entry.path for entry in wanted}]
    findings += [Finding(path, "absent", 0) for path in absent]
    return Verification(directory, name, tuple(sorted(findings, key=lambda finding: finding.path)))


def _listing(against: str, endpoints: Endpoints) -> tuple[str, Sequence[FileEntry]]:
    ref = ModelRef.parse(against)
    if ref.kind not in ("hf", "ms"):
        raise HubError(f"--against: got {against!r}; expected hf:org/name or ms:org/name, with or without @revision")
    if is_offline():
        raise HubError(f"--against {against}: HF_HUB_OFFLINE forbids the network; leave --against out")
    source = open_source(hub_order(ref, "auto")[0], endpoints)
    commit = source.resolve(ref)
    return f"{against} at {commit}", source.manifest(ref.at(commit))


def compare(
    directory: Path, wanted: Sequence[FileEntry], watch: Callable[[Finding], None] = lambda finding: None
) -> list[Finding]:
    """Read every file of `wanted` and compare its digest. HubError for one that cannot be read."""

    def check(entry: FileEntry) -> Finding:
        path = directory / entry.path
        try:
            size = path.stat().st_size
            actual = digests_of(path, [entry.algorithm])[entry.algorithm]
        except FileNotFoundError:
            return Finding(entry.path, "missing", entry.size, entry.algorithm, entry.digest)
        except OSError as error:
            raise HubError(f"{path}: cannot be read ({error}); check its permissions") from error
        state: State = "equal" if actual == entry.digest else "differs"
        return Finding(entry.path, state, size, entry.algorithm, entry.digest, actual)

    # Largest first, so that no thread is left alone with a long file at the end.
    ordered = sorted(wanted, key=lambda entry: -entry.size)
    findings = []
    with ThreadPoolExecutor(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ) as pool:
        for finding in pool.map(check, ordered):
            watch(finding)
            findings.append(finding)
    return findings
