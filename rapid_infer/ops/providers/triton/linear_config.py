"""How a product of few tokens is cut into programs. `benchmarks/tune_linear.py` measures the choices made here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

MAX_ROWS = 64
"""With more tokens a product is bound by arithmetic, and cuBLAS is better at that."""
PARTIALS = 1 << 22
"""fp32 numbers of the workspace that splits leave their sums in: 16 MiB."""
SEMAPHORES = 1 << 14


@dataclass(frozen=True)
class Config:
    """block_n outputs and, at a time, block_k inputs of a program; `splits` programs share the inputs of a block.

    gemv: plain arithmetic, one token; else tensor cores. weight_first: the weight is the left operand. `ahead`: what is
    fetched of each weight row before the kernel ahead has ended: lines of 128 bytes into L2, a power of two; for gemv,
    the first tile (1) or nothing (0).
    """

    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = 1
    gemv: bool = False
    weight_first: bool = False
    tma: bool = False
    ahead: int = 0

    def fits(self, m: int, n: int, gated: bool = False) -> bool:
        """Whether the workspace holds the partial sums of `[m, n]` outputs."""
        return self.splits == 1 or (
            self.splits * m * n * (1 + gated) <= PARTIALS and -(-n // self.block_n) <= SEMAPHORES
        )


def padded_rows(m: int) -> int:
    """Tokens that tensor cores compute for m: the classes that configurations are tuned for."""
    return 16 if m <= 16 else 32 if m <= 32 else 64


TUNED: dict[tuple[int, int, int, bool], Config | None] = {}
"""Measured on an H200 in 16 bits: by outputs, inputs, 1 or the padded rows, and whether gated."""


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
    """A program holds 32 KB of the weight in registers, less where that would leave multiprocessors without work."""
    block_k = min(max(1 << (k - 1).bit_length(), 128), 4096)
    block_n = min(max((8192 if heavy else 16384) // block_k, 1), 16)
    while block_n > 1 and n < 2 * sms * block_n:
        block_n //= 2
    config = Config(block_n, block_k, splits=-(-k // block_k), gemv=True, ahead=1)
    return config if config.fits(1, n, True) else Config(8, 1024, stages=3, gemv=True, ahead=1)


def _dot(n: int, k: int, m: int, sms: int, gated: bool) -> Config:
    """Two or three programs for each multiprocessor in one wave, each with 32 KB of loads or more in flight."""
    sizes = (32, 16) if gated else (64, 32, 16)
    block_n = next((size for size in sizes if n >= 2 * sms * size), 32 if m > 32 else 16)
    block_k = 256 if block_n * (1 + gated) <= 32 and m <= 32 else 128
    splits = 1
    while splits < 4 and -(-n // block_n) * (splits + 1) <= 3 * sms and k >= 8 * block_k * (splits + 1):
        splits += 1
    config = Config(block_n, block_k, splits, warps=2 if block_n == 16 else 4, stages=4, ahead=4)
    return config if config.fits(m, n, gated) else replace(config, splits=1)
