"""Where downloaded models are in the cache: one directory per commit, and which commit a revision last meant.

models/<source>/<org>/<name>/<commit>/            the files
models/<source>/<org>/<name>/refs/<revision>      the commit, as text
models/<source>/<org>/<name>/verified/<commit>.json   what was verified in a directory that is not ours
"""

from pathlib import Path
from urllib.parse import quote

from rapid_infer.errors import HubError
from rapid_infer.hub.cache import CACHE_VARIABLE, cache_dir
from rapid_infer.hub.lockfile import read_lock, replace_text, wrong_sizes


def commit_dir(source: str, repo: str, commit: str) -> Path:
    return _repo_dir(source, repo) / commit


def other_commits(repo: str, directory: Path) -> list[Path]:
    """The other downloads of a model, from either hub: many of their files are the same."""
    return sorted(path for path in (cache_dir() / "models").glob(f"*/{repo}/*/") if path != directory)


def lock_path(repo: str) -> Path:
    """The file that keeps other processes from downloading the same model, from whichever hub."""
    return cache_dir() / "models" / "locks" / repo.replace("/", "--")


def remember(source: str, repo: str, revision: str, commit: str) -> None:
    """Note what `revision` means now."""
    path = _ref_path(source, repo, revision)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, commit + "\n")
    except OSError as error:
        raise HubError(
            f"{path}: cannot be written ({error}); expected a writable cache; set {CACHE_VARIABLE} to another directory"
        ) from error


def recall(source: str, repo: str, revision: str) -> Path | None:
    """The directory of what `revision`, a name or a commit, meant when it was last asked for."""
    commit = recall_commit(source, repo, revision)
    directory = None if commit is None else commit_dir(source, repo, commit)
    return directory if directory is not None and directory.is_dir() else None


def recall_commit(source: str, repo: str, revision: str) -> str | None:
    """The commit that `revision`, a name or a commit, meant when it was last asked for."""
    try:
        commit = _ref_path(source, repo, revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    return commit if len(commit) == 40 and commit.isalnum() else None


def verified_path(source: str, repo: str, commit: str) -> Path:
    return _repo_dir(source, repo) / "verified" / f"{commit}.json"


def problems(directory: Path) -> list[str]:
    """Why a directory of the cache cannot be used as it is; empty when it can. Looks at sizes only."""
    lock = read_lock(directory)
    if lock is None:
        return ["its lock file is missing"]
    if lock.include is not None:
        return [f"only {' '.join(lock.include)} was downloaded"]
    return wrong_sizes(directory, lock.files)


def _repo_dir(source: str, repo: str) -> Path:
    return cache_dir() / "models" / source / repo


def _ref_path(source: str, repo: str, revision: str) -> Path:
    return _repo_dir(source, repo) / "refs" / quote(revision, safe="")
