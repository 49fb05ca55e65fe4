"""Compiles the kernel once for a version of torch, and keeps the library: `python -m rapid_infer_op_cuda.build`."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

NAME = "rapid_infer_op_cuda"
SOURCES = [Path(__file__).with_name(name) for name in ("norm.h", "norm.cu", "binding.cpp")]
# Machine code for SM 90, and PTX, which the driver compiles for newer GPUs.
FLAGS = ["-O3", "-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]


@cache
def library() -> Path:
    """Where the compiled kernel belongs. Another source, torch or CUDA is another file."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    text = [torch.__version__, str(torch.version.cuda), *FLAGS, *(source.read_text() for source in SOURCES)]
    return Path(root) / f"{NAME}-{hashlib.sha256('|'.join(text).encode()).hexdigest()[:16]}.so"


@cache
def cannot_build() -> tuple[str, ...]:
    """Why there is no kernel and none can be compiled; empty where there is one, or can be."""
    if torch.version.cuda is None:
        return (f"torch {torch.__version__} is built without CUDA",)
    if library().exists():
        return ()
    from torch.utils.cpp_extension import CUDA_HOME

    tools = [f"{tool} is not found: install it" for tool in ("ninja", "c++") if shutil.which(tool) is None]
    if CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").exists():
        tools.insert(0, "nvcc is not found: install the CUDA toolkit, or set CUDA_HOME to where it is")
    return tuple(tools)


@cache
def load() -> None:
    """Make `torch.ops.rapid_infer_op_cuda` known, compiled first where it is not yet.

    RuntimeError with the compiler's output where that fails.
    """
    path = library()
    if path.exists():
        torch.ops.load_library(str(path))
        return
    from torch.utils.cpp_extension import load as compile_and_load

    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder for each process, and a file that appears at once: nobody waits for one that was killed.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compile_and_load(
            name=NAME,
            sources=[str(source) for source in SOURCES if source.suffix != ".h"],
            extra_cflags=["-O2"],
            extra_cuda_cflags=FLAGS,
            build_directory=folder,
            is_python_module=False,
        )
        os.replace(Path(folder, f"{NAME}.so"), path)


if __name__ == "__main__":
    if reasons := cannot_build():
        raise SystemExit(f"error: {'; '.join(reasons)}")
    load()
    print(library())
