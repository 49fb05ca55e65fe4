"""Peak memory and GPU utilisation while the timed runs go on."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import IO

INTERVAL_MS = 200


@dataclass
class Resources:
    """None: not known here.

    peak_rss_bytes              of this process, on the host
    peak_gpu_allocated_bytes    by torch in this process, all its GPUs together
    peak_gpu_used_bytes         of the whole device, all GPUs of the run together, other processes included
    gpu_utilization             share of the time in which a kernel ran, mean over GPUs and samples, 0 to 1
    """

    peak_rss_bytes: int | None = None
    peak_gpu_allocated_bytes: int | None = None
    peak_gpu_used_bytes: int | None = None
    gpu_utilization: float | None = None


class Monitor:
    """Watches between `__enter__` and `__exit__`, then `resources` is filled in.

    gpus     how many the run uses; 0: host memory only
    sample   let nvidia-smi take samples meanwhile
    """

    def __init__(self, gpus: int, sample: bool = True) -> None:
        self.resources = Resources()
        self._gpus = gpus
        self._sample = sample
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def __enter__(self) -> Monitor:
        reset_peak_rss()
        if self._gpus:
            import torch

            for i in range(self._gpus):
                torch.cuda.reset_peak_memory_stats(i)
        if self._gpus and self._sample:
            self._watch()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.resources.peak_rss_bytes = peak_rss()
        if self._gpus:
            import torch

            allocated = [torch.cuda.max_memory_allocated(i) for i in range(self._gpus)]
            self.resources.peak_gpu_allocated_bytes = sum(allocated)
            free_total = [torch.cuda.mem_get_info(i) for i in range(self._gpus)]
            self.resources.peak_gpu_used_bytes = sum(total - free for free, total in free_total)
        self._stop()

    def _watch(self) -> None:
        # A process of its own: a thread would compete with the engine for the interpreter.
        query = ["nvidia-smi", "--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in _stop
        try:
            self._process = subprocess.Popen(
                [*query, "-lms", str(INTERVAL_MS)], stdout=log, stderr=subprocess.DEVNULL, text=True
            )
            self._log = log
        except OSError:
            log.close()

    def _stop(self) -> None:
        if self._process is None or self._log is None:
            return
        import torch

        self._process.terminate()
        self._process.wait()
        self._log.seek(0)
        names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(self._gpus)]
        self.resources.gpu_utilization, used = parse_samples(self._log, names)
        self.resources.peak_gpu_used_bytes = max(self.resources.peak_gpu_used_bytes or 0, used or 0) or None
        self._log.close()
        self._process = self._log = None


def parse_samples(lines: Iterable[str], uuids: Iterable[str]) -> tuple[float | None, int | None]:
    """Mean utilisation (0 to 1) and the largest memory sum in bytes of these GPUs, of lines "uuid, percent, MiB"."""
    wanted = {uuid.removeprefix("GPU-") for uuid in uuids}
    shares: list[float] = []
    used: dict[str, int] = {}
    for line in lines:
        fields = [field.strip() for field in line.split(",")]
        name = fields[0].removeprefix("GPU-")
        # The last line may be cut, and a figure may be "[N/A]".
        if len(fields) != 3 or name not in wanted:
            continue
        if fields[1].isdigit():
            shares.append(int(fields[1]) / 100)
        if fields[2].isdigit():
            used[name] = max(used.get(name, 0), int(fields[2]) * 1024**2)
    return (sum(shares) / len(shares) if shares else None), (sum(used.values()) if used else None)


def reset_peak_rss() -> None:
    """Let `peak_rss` count from now on, where the system can do that."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        pass


def peak_rss() -> int | None:
    """Bytes; since `reset_peak_rss` on Linux, since the start of the process elsewhere."""
    try:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
