"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for its results.

A kernel launched with `options(x)` takes the constexpr `PDL`, and calls `start_next` first and `wait_previous` before
its first access to anything but weights; the wait also orders its writes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import DependenciesFinder

from rapid_infer.device import GpuInfo, gpu_info
from rapid_infer.ops.providers.triton.facts import INTERPRETED


def _hash_what_is_called_first() -> None:
    """Make a kernel's hash, by which compiled kernels are found, the same in all processes.

    Triton takes over the constants of a function that the kernel calls before it hashes that function, which finds
    them: they count only if another kernel had it hashed earlier. Kernels that one process compiled, another with
    another order of launches does not find, and compiles again.
    """
    update = DependenciesFinder._update_hash

    def hash_first(self: DependenciesFinder, func: Any) -> None:
        _ = func.cache_key
        update(self, func)

    DependenciesFinder._update_hash = hash_first


_hash_what_is_called_first()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel in the stream be launched once every program of this one has come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """Return when the kernels before this one are done and their writes are visible."""
    if PDL:
        gdc_wait()


@cache
def _gpu(device: torch.device) -> GpuInfo:
    gpu = gpu_info(device)
    assert gpu is not None, f"{device} is no GPU"
    return gpu


@cache
def has_tma(device: torch.device) -> bool:
    return INTERPRETED or _gpu(device).capability >= (9, 0)


@cache
def _options(device: torch.device) -> dict[str, Any]:
    if INTERPRETED or not has_tma(device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def options(x: Tensor) -> dict[str, Any]:
    """Launch options for a kernel on x's device."""
    return _options(x.device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; a small number for the interpreter, so that tests meet every path."""
    return 4 if INTERPRETED else _gpu(device).multiprocessors
