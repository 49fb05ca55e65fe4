"""What `rapid-infer doctor` says of the machine: versions, devices, driver, caches, and variables that change them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rapid_infer.version import __version__

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "modelscope-hub",
    "numpy",
    "uvicorn",
    "llguidance",
    "flash-attn",
    "flashinfer-python",
    "vllm",
)
PREFIXES = ("RAPID_INFER_", "HF_", "TRANSFORMERS_", "MODELSCOPE_", "TRITON_", "CUDA_", "NCCL_", "TORCH_", "OMP_")
NAMES = ("XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "MKL_NUM_THREADS", "LD_LIBRARY_PATH")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PROXY")
"""In the name of a variable whose value is not shown; a proxy's may hold a password."""
DRIVER = Path("/proc/driver/nvidia/version")


def environment() -> dict[str, Any]:
    """Plain data. Bytes; `writable` of a folder that is not there is that of the nearest one above it."""
    import torch

    from rapid_infer.device import available_host_memory, physical_cores, probe

    return {
        "rapid_infer": __version__,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {package: _version(package) for package in PACKAGES},
        "cpu": {
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "physical_cores": physical_cores(),
            "bfloat16": probe("cpu").bfloat16,
            "available_bytes": available_host_memory(),
        },
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "caches": _caches(),
        "variables": {
            name: "(set)" if SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if name.upper() in NAMES or name.startswith(PREFIXES)
        },
    }


def _gpu(number: int) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {"name": found.name, "capability": f"{found.major}.{found.minor}", "bytes": total, "free_bytes": free}


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver."""
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _caches() -> list[dict[str, Any]]:
    from rapid_infer.hub.cache import cache_dir
    from rapid_infer.hub.client_cache import client_caches
    from rapid_infer.ops.precompile.cache import VARIABLE

    models = cache_dir()
    kernels = Path(os.environ.get(VARIABLE) or models / "kernels")
    return [_folder(name, path) for name, path in {"models": models, "kernels": kernels, **client_caches()}.items()]


def _folder(name: str, path: Path) -> dict[str, Any]:
    there = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    return {
        "name": name,
        "path": str(path),
        "exists": path.is_dir(),
        "writable": os.access(there, os.W_OK),
        "free_bytes": shutil.disk_usage(there).free,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
