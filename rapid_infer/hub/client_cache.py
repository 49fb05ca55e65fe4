"""Models in the caches of the hubs' own clients: found there, verified once, used in place; nothing is written there.

$HF_HUB_CACHE/models--<org>--<name>/snapshots/<commit>/     links into blobs/, which are named after their digests
$MODELSCOPE_CACHE/models/<org>--<name>/snapshots/<revision>/     plain files, whose digests only the hub can tell
$MODELSCOPE_CACHE/[hub/][models/]<org>/<name>/                   the same, by older clients
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub.lockfile import Lock, listed
from rapid_infer.hub.selection import needed
from rapid_infer.hub.snapshot import snapshot_files
from rapid_infer.hub.store import recall_commit
from rapid_infer.hub.verified import read_verified, unverified

Note = Callable[[str], None]


def directories(source: str, repo: str, revision: str, commit: str | None) -> list[Path]:
    """Where the client of `source` keeps, or kept, this model; those that are there."""
    owner, _, name = repo.partition("/")
    folder = f"models/{owner}--{name}/snapshots"
    if source == "huggingface":
        found = [_hf_repo(repo) / "snapshots" / commit] if commit else []
    else:
        base, old = _modelscope_cache(), f"{owner}/{name.replace('.', '___')}"
        below = (f"{folder}/{revision}", f"models/{old}", f"hub/models/{old}", old, f"hub/{old}", f"hub/{repo}", repo)
        found = [base / path for path in dict.fromkeys(below)]
    return [path for path in found if path.is_dir()]


def find(source: str, endpoint: str, repo: str, revision: str, note: Note) -> tuple[Path, Lock] | list[str]:
    """The directory in which the client has what `revision` meant when it was last asked for; else why none is used.

    Without network. Files are read when they are met for the first time, or were changed; `note` is told.
    """
    wrong: list[str] = []
    commits = [recall_commit(source, repo, revision)]
    if source == "huggingface":
        commits.append(_hf_commit(repo, revision))
    for commit in dict.fromkeys(commit for commit in commits if commit):
        for directory in directories(source, repo, revision, commit):
            lock = read_verified(source, repo, commit, directory)
            if lock is None and source == "huggingface":
                try:
                    files = snapshot_files(directory)
                except HubError as error:
                    wrong.append(f"{directory}: {error}")
                    continue
                lock = Lock(source, endpoint, repo, revision, commit, None, files)
            if lock is None:
                continue
            if not (problems := unverified(directory, lock, note)):
                return directory, lock
            wrong.append(f"{directory}: {listed(problems)}")
    if source == "modelscope" and not wrong:
        wrong += [
            f"{directory}: ModelScope's cache keeps no digests, so it is used once it was compared with the hub's "
            f"listing (rapid-infer download ms:{repo}, with network), or when it is given as a directory"
            for directory in directories(source, repo, revision, None)[:1]
        ]
    return wrong


def find_listed(lock: Lock, note: Note) -> tuple[Path, Lock] | list[str]:
    """The same for what a hub lists now, `lock`; without licence and README when the client has none."""
    wrong: list[str] = []
    lock = replace(lock, files=tuple(needed(lock.files)))
    for directory in directories(lock.source, lock.repo, lock.revision, lock.commit):
        if not (problems := unverified(directory, lock, note)):
            return directory, lock
        wrong.append(f"{directory}: {listed(problems)}")
    return wrong


def client_caches() -> dict[str, Path]:
    """Hub -> the folder in which its client keeps models, there or not."""
    return {"huggingface": _hf_cache(), "modelscope": _modelscope_cache()}


def _hf_cache() -> Path:
    home = _folder("HF_HOME") or (_folder("XDG_CACHE_HOME") or _home() / ".cache") / "huggingface"
    return _folder("HF_HUB_CACHE") or _folder("HUGGINGFACE_HUB_CACHE") or home / "hub"


def _hf_repo(repo: str) -> Path:
    return _hf_cache() / f"models--{repo.replace('/', '--')}"


def _hf_commit(repo: str, revision: str) -> str | None:
    """What the client noted for `revision`, or `revision` itself."""
    path = _hf_repo(repo) / "refs" / revision
    try:
        commit = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    return commit if len(commit) == 40 and commit.isalnum() else None


def _modelscope_cache() -> Path:
    return _folder("MODELSCOPE_CACHE") or _home() / ".cache" / "modelscope"


def _folder(variable: str) -> Path | None:
    """A directory that the environment names, as the clients read it: with ~ and other variables in it."""
    text = os.path.expandvars(os.path.expanduser(os.environ.get(variable, "").strip()))
    return Path(text).absolute() if text else None


def _home() -> Path:
    return Path(os.path.expanduser("~"))
