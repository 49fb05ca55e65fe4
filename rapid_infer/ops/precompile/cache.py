"""Where compiled kernels lie, and which models have found all of theirs there.

Imports no torch, and Triton only to hash it.

Triton names kernels by their source and arguments, so the cache may be shared by models, versions and processes, and
copied to another machine under the same path. Beside them lies a list for every model and set of options that was
compiled for as a whole: who finds it, and all that it names, need not ask what there is to compile.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rapid_infer.config import EngineArgs
from rapid_infer.device import GpuInfo
from rapid_infer.errors import ConfigError
from rapid_infer.hub.cache import CACHE_VARIABLE, cache_dir
from rapid_infer.registry import Entry, EntryPointTable

VARIABLE = "TRITON_CACHE_DIR"
UNRELATED = (
    "seed", "revision", "hub", "model_plugin", "model_impl", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "enable_prefix_caching", "skip_tokenizer_init", "num_threads", "load_format", "queue_depth",
)  # fmt: skip
"""Engine options that change no kernel."""


def use_kernel_cache() -> Path:
    """Let Triton keep kernels in `$TRITON_CACHE_DIR`, else in this runtime's cache directory; created if need be.

    ConfigError when it cannot be written.
    """
    path = Path(os.environ.setdefault(VARIABLE, str(cache_dir() / "kernels")))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"compiled kernels cannot be kept in {path}: {error}; set {CACHE_VARIABLE} or {VARIABLE} to a directory "
            f"that can be written"
        ) from error
    return path


def hash_triton() -> threading.Thread:
    """Begins, in a thread, what is part of every kernel's name: the hash of Triton's own files, 400 MB. It takes half a
    second for which nobody need wait, once per process.
    """
    # Imported here, since two threads must not import it at once.
    from triton.runtime.cache import triton_key

    thread = threading.Thread(target=triton_key, name="hash of Triton", daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True)
class KernelList:
    """The list of one model and set of options: kernels by GPU, as names of folders in the cache."""

    cache: Path
    key: str

    @classmethod
    def of(cls, cache: Path, checkpoint: Path, entry: Entry, args: EngineArgs) -> KernelList:
        """Its key is all that kernels depend on but the GPU: config.json, options, versions, and the sources of the
        runtime, of the plugin and of packages of operators.
        """
        packages = [entry, *EntryPointTable("rapid_infer.ops").entries()]
        folders = [folder for package in packages for folder in _folders(package.target)]
        options = {name: value for name, value in asdict(args).items() if name not in UNRELATED}
        parts = [
            hashlib.sha256((checkpoint / "config.json").read_bytes()).hexdigest(),
            [(package.target, package.version) for package in packages], sorted(options.items()),
            [_version(name) for name in ("torch", "triton", "transformers")],
            [_sources(root) for root in (Path(__file__).parents[2], *folders)],
        ]  # fmt: skip
        return cls(cache, hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32])

    @property
    def path(self) -> Path:
        return self.cache / "models" / f"{self.key}.json"

    @property
    def lock(self) -> Path:
        return self.cache / "models" / f"{self.key}.lock"

    def complete(self, gpu: GpuInfo | None = None) -> bool:
        """Whether all kernels are there for this GPU, or, without one, for some GPU."""
        found = self._read()
        wanted = found.values() if gpu is None else filter(None, [found.get(_name(gpu))])
        return any(all((self.cache / kernel).is_dir() for kernel in kernels) for kernels in wanted)

    def write(self, gpu: GpuInfo, kernels: Sequence[str]) -> None:
        """Say that these are all kernels for this GPU."""
        content = json.dumps({**self._read(), _name(gpu): list(kernels)}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, self.path)

    def _read(self) -> dict[str, list[str]]:
        try:
            return json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}


def _name(gpu: GpuInfo) -> str:
    return f"{gpu.name}, SM {gpu.capability[0]}{gpu.capability[1]}, {gpu.multiprocessors} multiprocessors"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _folders(target: str) -> list[Path]:
    """Of a package that brings models or operators, whose author may be changing it."""
    try:
        spec = find_spec(re.split(r"[.:]", target)[0])
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def _sources(root: Path) -> str:
    """Changes when a file of the package does."""
    files = sorted(root.rglob("*.py"))
    stats = [(str(file.relative_to(root)), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()
