"""Lets Triton compile for a GPU that the process does not use, and need not have."""

from __future__ import annotations

import subprocess
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.backends.nvidia.driver import CudaUtils, libcuda_dirs
from triton.runtime import driver

from rapid_infer.device import GpuInfo


def compile_for(gpu: GpuInfo) -> None:
    """Let this process, and those that it forks, compile for a GPU that it does not use."""
    target = _Target(gpu)
    driver.set_active(target)
    # Triton asks its assembler for its version once per process.
    get_ptxas_version(target.get_current_target().arch)


def can_link() -> bool:
    """Whether the driver's library is here, with which the host's code for launches is linked."""
    try:
        return bool(libcuda_dirs())
    except (AssertionError, OSError, subprocess.CalledProcessError):
        return False


def compile_driver() -> str:
    """What Triton itself compiles for a process's first launch."""
    CudaUtils()
    return ""


class _Target(DriverBase):
    """Says what to compile for, and launches nothing."""

    def __init__(self, gpu: GpuInfo) -> None:
        major, minor = gpu.capability
        self._target = GPUTarget("cuda", major * 10 + minor, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched here")

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is launched here")
