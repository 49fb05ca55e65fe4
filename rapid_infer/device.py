"""Which device the engine runs on, and what config resolution must know of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rapid_infer.config import DeviceFacts
from rapid_infer.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GpuFacts:
    """What providers choose and compile kernels by."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


_assumed: list[GpuFacts] = []


def assume_gpu(facts: GpuFacts) -> None:
    """From here on tensors on "meta" stand for tensors on such a GPU, which this process need not have."""
    _assumed[:] = [facts]


@cache
def gpu_facts(device: torch.device) -> GpuFacts | None:
    """Facts of a CUDA device, on "meta" those of `assume_gpu`; None where it is no GPU."""
    import torch

    if device.type == "meta":
        return _assumed[0] if _assumed else None
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return GpuFacts(found.name, (found.major, found.minor), found.multi_processor_count)


def probe(device: str = "auto") -> DeviceFacts:
    """Facts of the wanted device ("auto": a GPU if there is one). ConfigError when it is absent or unknown."""
    import torch

    kind = device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={device!r}: torch {torch.__version__} sees no CUDA device; use device='cpu'")
        free, _ = torch.cuda.mem_get_info()
        return DeviceFacts("cuda", torch.cuda.is_bf16_supported(), free)
    if kind != "cpu":
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    return DeviceFacts("cpu", torch.ops.mkldnn._is_mkldnn_bf16_supported(), available_host_memory())


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
    """Bytes of memory a new process could take, by /proc/meminfo where there is one, else half of the machine's."""
    try:
        with open("/proc/meminfo") as f:
            fields = dict(line.split(":", 1) for line in f)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
