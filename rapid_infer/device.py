"""Which device the engine runs on, and what config resolution must know of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rapid_infer.config import DeviceInfo
from rapid_infer.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GpuInfo:
    """What providers choose and compile kernels by."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


_assumed: list[GpuInfo] = []


def assume_gpu(info: GpuInfo) -> None:
    """From here on tensors on "meta" stand for tensors on such a GPU, which this process need not have."""
    _assumed[:] = [info]
    gpu_info.cache_clear()


@cache
def gpu_info(device: torch.device) -> GpuInfo | None:
    """What is known of a CUDA device, on "meta" what `assume_gpu` said; None where it is no GPU."""
    import torch

    if device.type == "meta":
        return _assumed[0] if _assumed else None
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return GpuInfo(found.name, (found.major, found.minor), found.multi_processor_count)


PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class CgroupFiles(NamedTuple):
    """Where a version of cgroups says how much memory a group may take, takes, and could give back."""

    folder: str
    limit: str
    used: str
    reclaimable: tuple[str, ...]


CGROUP_V1 = CgroupFiles(
    "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
CGROUP_V2 = CgroupFiles("", "memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))


def probe(device: str = "auto") -> DeviceInfo:
    """What is known of the wanted device ("auto": a GPU if there is one). ConfigError when it is absent or unknown."""
    import torch

    kind = device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={device!r}: torch {torch.__version__} sees no CUDA device; use device='cpu'")
        free, _ = torch.cuda.mem_get_info()
        return DeviceInfo("cuda", torch.cuda.is_bf16_supported(), free)
    if kind != "cpu":
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    return DeviceInfo("cpu", torch.ops.mkldnn._is_mkldnn_bf16_supported(), available_host_memory())


def set_num_threads(wanted: int | None) -> None:
    """Threads for arithmetic on the CPU: `wanted`, else OMP_NUM_THREADS, else one per physical core of this process.

    A second thread on a core shares its arithmetic units and its cache: it makes matrix products slower, not faster.
    """
    import torch

    if wanted is None and "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(wanted or physical_cores())


def physical_cores() -> int:
    """Cores this process may run on, hyperthreads of one core counted once where the system tells."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in sorted(cpus):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as f:
                cores.add(f.read().strip())
        except OSError:
            cores.add(str(cpu))
    return max(len(cores), 1)


def available_host_memory() -> int:
    """Bytes of memory that this process could take, or half of the machine's where the system does not tell."""
    return _known_host_memory() or _machine_memory() // 2


def host_memory_limit() -> int:
    """The same, but all of the machine's where the system does not tell: more than that can never be had."""
    return _known_host_memory() or _machine_memory()


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _known_host_memory() -> int | None:
    """MemAvailable, which counts page cache that can be given back, within what the process's cgroups have left."""
    try:
        fields = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return max(min([available, *_cgroup_rooms()]), 1)


def _cgroup_rooms() -> Iterator[int]:
    """Bytes that each memory cgroup above this process would still give it, page cache taken back."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = CGROUP_V1 if controllers else CGROUP_V2
        base = CGROUPS / files.folder
        # In a container the path may be the host's, and the mount the container's own group: then the base holds it.
        inner = Path(path.strip("/"))
        for folder in (base / inner, *(base / parent for parent in inner.parents)):
            room = _room(folder, files)
            if room is not None:
                yield room


def _room(folder: Path, files: CgroupFiles) -> int | None:
    """None without a limit."""
    try:
        limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit - used + sum(int(stat.get(name, 0)) for name in files.reclaimable)
