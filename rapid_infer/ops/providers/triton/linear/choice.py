"""Which configuration a product gets: a measured one, else by rules that the measurements suggest."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from rapid_infer.ops.providers.triton.linear.config import Config, padded_rows
from rapid_infer.ops.providers.triton.linear.tuned import TUNED

MAX_ROWS = 64
"""With more tokens a product is bound by arithmetic, and cuBLAS is better at that."""


@cache
def choose(n: int, k: int, m: int, dtype: torch.dtype, sms: int, gated: bool = False) -> Config | None:
    """For x `[m, k]` and weight `[n, k]` (gated: `[2 n, k]`) on a device of `sms` multiprocessors; None: cuBLAS."""
    if not 1 <= m <= MAX_ROWS or k % 16:
        return None
    wide = dtype.itemsize > 2
    key = n, k, m if m == 1 else padded_rows(m), gated
    if key in TUNED and not wide:
        return TUNED[key]
    if m == 1:
        return _gemv(n, k, sms, wide or gated)
    # Tensor cores have no full fp32.
    return None if wide else _dot(n, k, m, sms, gated)


def _gemv(n: int, k: int, sms: int, heavy: bool) -> Config:
    """A program holds up to 32 KB of the weight in registers, less where that would leave multiprocessors idle."""
    block_k = min(max(1 << (k - 1).bit_length(), 128), 4096)
    looped = k > 4096
    if looped:
        block_k = 2048
    block_n = min(max((8192 if heavy else 16384) // block_k, 1), 16)
    while block_n > 1 and n < 2 * sms * block_n:
        block_n //= 2
    warps, stages = 2 if block_n * block_k <= 4096 else 4, 3 if looped else 1
    return Config(block_n, block_k, warps=warps, stages=stages, gemv=True, ahead=1)


def _dot(n: int, k: int, m: int, sms: int, gated: bool) -> Config | None:
    """About as many programs as multiprocessors; with more rows than 32 only the largest weights are worth it."""
    if m > 32:
        return Config(128, 64, stages=5) if n >= 256 * sms and not gated else None
    block_n, block_k = (32, 128) if gated else (64, 128)
    blocks = -(-n // block_n)
    splits = 1
    while splits < 4 and blocks * splits * 2 <= 2 * sms and k >= 8 * block_k * splits:
        splits *= 2
    stages = 3 if blocks >= 2 * sms else 5
    config = Config(block_n, block_k, splits, stages=stages, weight_first=not gated, ahead=4)
    return config if config.fits(m, n, gated) else replace(config, splits=1)
