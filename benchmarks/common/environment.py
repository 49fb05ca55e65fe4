"""Where a benchmark runs: versions, commit, driver, devices and their links. Whatever cannot be found is None."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.schema import Environment

ROOT = Path(__file__).resolve().parents[2]


def collect(load_average: float | None = None) -> Environment:
    """Ask this process, git and nvidia-smi; `load_average` is what was found before the benchmark began."""
    import torch

    status = _git("status", "--porcelain", "--untracked-files=no")
    on_gpu = torch.cuda.is_available()
    drivers = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None
    return Environment(
        rapid_infer=_version("rapid-infer"),
        commit=_git("rev-parse", "HEAD"),
        uncommitted_changes=None if status is None else bool(status),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=_version("transformers"),
        cuda=torch.version.cuda,
        driver=drivers.splitlines()[0].strip() if drivers else None,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if on_gpu else [],
        topology=(run("nvidia-smi", "topo", "-m") or None) if on_gpu else None,
        cpu=_cpu_model(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        load_average=load_average,
        platform=platform.platform(),
    )


def load_average() -> float | None:
    """Of the last minute, where the system counts it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def run(*command: str, timeout: float = 20) -> str | None:
    """What a command prints; None when it is absent, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _git(*arguments: str) -> str | None:
    """None unless the rapid_infer that runs is the one of this checkout."""
    import rapid_infer

    if not rapid_infer.__file__ or Path(rapid_infer.__file__).resolve().parents[1] != ROOT:
        return None
    return run("git", "-C", str(ROOT), *arguments)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo") as f:
            found = next((line for line in f if line.startswith("model name")), None)
        return found.partition(":")[2].strip() if found else platform.processor() or None
    except OSError:
        return platform.processor() or None
