"""The cache directory, and a lock that holds between processes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rapid_infer.errors import HubError

CACHE_VARIABLE = "RAPID_INFER_CACHE"


def cache_dir() -> Path:
    """Return the absolute cache directory; it is not created.

    `$RAPID_INFER_CACHE`, else `$XDG_CACHE_HOME/rapid_infer`, else `~/.cache/rapid_infer`. An empty variable counts as
    unset, and so does a relative `XDG_CACHE_HOME` (its specification says so). Raises HubError when the home
    directory is needed and unknown.
    """
    try:
        own = os.environ.get(CACHE_VARIABLE, "").strip()
        if own:
            return Path(own).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME", "").strip()
        if xdg and Path(xdg).is_absolute():
            return Path(xdg) / "rapid_infer"
        return Path.home() / ".cache" / "rapid_infer"
    except RuntimeError as error:
        raise HubError(f"cache directory: {error}; set {CACHE_VARIABLE} to a writable directory") from error


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path` for the duration of a `with` block; only one process at a time gets in.

    Parent directories are created. When another process holds the lock, `on_wait` is called once and the call blocks
    until the lock is free; the operating system frees it when its holder dies. Raises HubError when the lock file
    cannot be made; exceptions of the block itself pass through unchanged.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if on_wait is not None:
                on_wait()
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise HubError(
            f"lock file {path}: cannot lock it ({error}); expected a writable cache directory: "
            f"set {CACHE_VARIABLE} to one"
        ) from error
    try:
        yield
    finally:
        lock.release()
