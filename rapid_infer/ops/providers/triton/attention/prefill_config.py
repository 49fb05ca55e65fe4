"""How attention of rows with several tokens is cut into programs, and which way they read keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from rapid_infer.device import gpu_info
from rapid_infer.ops.providers.triton.facts import INTERPRETED
from rapid_infer.ops.providers.triton.launch import has_tma

QUERIES = 128
"""Query heads of a tile, all its tokens together."""
FEW_QUERIES = 64
"""The same where larger tiles would leave multiprocessors without work."""
FP32_QUERIES = 16
"""Exact products are made without tensor cores, from registers, where more would not fit."""
POINTER_BYTES = 16384
"""Of a tile of keys: with pipelined keys and values, two programs still fit a multiprocessor's shared memory."""
POINTER_KEYS = 64
"""Of such a tile at most: a page, so that it needs one entry of the block table."""
PAGE = 64
"""Keys of a tile that TMA copies: a page, or part of a larger one."""


@dataclass(frozen=True)
class PrefillConfig:
    """`queries` query heads of a program, all its tokens together, and `keys` keys at a time.

    tma: tiles of keys are copied by TMA, else each thread copies its part. hopper: the kernel for SM 90 alone, which
    takes tma, and has QUERIES queries, one or two times PAGE keys, stages of two pages and its own number of warps.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = False
    hopper: bool = False


def choose(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, tma: bool, sms: int, hopper: bool = False
) -> PrefillConfig:
    """For `tokens` tokens on a GPU with `sms` multiprocessors, as `benchmarks/tune_prefill.py` found on an H200.

    `tma`: whether `tma_view` found keys readable so; `hopper`: whether the kernel for SM 90 can run.
    """
    if dtype == torch.float32 and not tma:
        return PrefillConfig(FP32_QUERIES, pointer_keys(dim, dtype), warps=8, stages=3)
    many = tokens * heads > QUERIES * sms
    if hopper and tma and many:
        return PrefillConfig(QUERIES, PAGE, warps=4, stages=2, tma=True, hopper=True)
    if tma and dim <= 128:
        return PrefillConfig(FEW_QUERIES, PAGE, warps=4, stages=3, tma=True)
    queries = QUERIES if many else FEW_QUERIES
    warps = 8 if queries * dim >= 128 * 128 else 4
    if tma:
        return PrefillConfig(queries, PAGE, warps, stages=2, tma=True)
    return PrefillConfig(queries, pointer_keys(dim, dtype), warps, stages=3)


@cache
def has_hopper_kernel(device: torch.device) -> bool:
    """Gluon is experimental: its kernel is for the one Triton it was written with."""
    gpu = gpu_info(device)
    return not INTERPRETED and gpu is not None and gpu.capability == (9, 0) and triton.__version__.startswith("3.6.")


def pointer_keys(dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile that threads copy."""
    padded = max(triton.next_power_of_2(dim), 16)
    return min(max(POINTER_BYTES // (padded * dtype.itemsize), 16), POINTER_KEYS)


def tma_view(cache: Tensor, keys: int) -> Tensor | None:
    """The cache `[blocks, block_size, kv_heads, dim]` as `[blocks, block_size, kv_heads * dim]`, or None.

    None: TMA cannot copy `keys` slots of it. That takes tiles that lie in one block, dims that fill them, and all at
    multiples of 16 bytes.
    """
    size, _, dim = cache.shape[1:]
    size_fits = cache.dtype.itemsize == 2 or (INTERPRETED and cache.dtype.itemsize > 2)
    if not has_tma(cache.device) or not size_fits:
        return None
    aligned = cache.data_ptr() % 16 == 0 and all(
        stride * cache.dtype.itemsize % 16 == 0 for stride in cache.stride()[:2]
    )
    if size % keys or dim < 16 or dim & (dim - 1) or not aligned or cache.stride()[2:] != (dim, 1):
        return None
    return cache.flatten(2)
