"""Which configuration a quantized product of few tokens gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from rapid_infer.ops.providers.triton.linear.config import PARTIALS, SEMAPHORES, padded_rows
from rapid_infer.ops.quantized import HALF, PACKED, QuantizedMatrix

MAX_ROWS = 64
"""With more tokens arithmetic takes the time, and other kernels are better at that."""

SHARED_BYTES = 100_000
"""For the stages of a program: two fit a multiprocessor."""


@dataclass(frozen=True)
class Config:
    """block_n outputs and, at a time, `block` bytes of each row of the matrix; otherwise as `linear.config.Config`."""

    block_n: int
    block: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    weight_first: bool = False
    ahead: int = 4
    gemv: bool = False

    def fits(self, m: int, n: int) -> bool:
        """Whether the workspace holds the partial sums of `[m, n]` outputs."""
        return self.splits == 1 or (self.splits * m * n <= PARTIALS and -(-n // self.block_n) <= SEMAPHORES)


def is_inner(form: str, group: int) -> bool:
    """Whether scales are multiplied into the values."""
    return form == "fp4" or (form == "int4" and 0 < group < HALF)


def inner_group(matrix: QuantizedMatrix) -> int:
    """Columns that share a scale, 0: all of a row."""
    return 0 if matrix.scale.shape[-1] == 1 else matrix.group[1]


def cannot_multiply(matrix: QuantizedMatrix, dtype: torch.dtype, wide: bool) -> bool:
    """Whether the kernel cannot take it. `wide`: it multiplies in fp32."""
    group, k = inner_group(matrix), matrix.shape[1]
    if (dtype is torch.float32 and not wide) or k % 16 or matrix.values.dim() != 2:
        return True
    if not (matrix.values.is_contiguous() and matrix.scale.is_contiguous()):
        return True
    if matrix.form == "fp4" and dtype is torch.float16 and matrix.scale.element_size() == 1:
        # The range of e8m0 is not that of fp16.
        return matrix.scale.dtype is not torch.float8_e4m3fn
    if group == 0:
        return False
    if matrix.form == "fp8":
        return group % PACKED != 0 and group not in (16, 32, 64)
    return group % HALF != 0 and group not in (16, 32)


def block_limit(form: str, group: int) -> int:
    """The most bytes that may be taken at a time: those of a group, where its sum is multiplied."""
    if form == "fp8":
        return 256 if group == 0 or group % 256 == 0 else min(group, PACKED)
    return 128 if group == 0 or is_inner(form, group) else HALF


@cache
def choose(form: str, n: int, k: int, m: int, group: int, sms: int) -> Config | None:
    """For x `[m, k]` and a matrix `[n, k]` on a device of `sms` multiprocessors; None: other kernels are faster.

    What an H200 did best at the products of an 8B model, which agree with each other.
    """
    if not 1 <= m <= MAX_ROWS:
        return None
    if m == 1 and form == "fp8":
        return Config(2, min(max(1 << (k - 1).bit_length(), 128), 4096), stages=3 if k > 4096 else 1, gemv=True)
    rows, fp8 = padded_rows(m), form == "fp8"
    block = min(block_limit(form, group), 128)
    weight_first = rows == 64 if fp8 else rows > 16
    block_n = 64 if weight_first or form == "fp4" else 128
    splits, blocks = 1, -(-n // block_n)
    width = k if fp8 else -(-k // PACKED) * HALF
    # Enough programs for the latency of each to be hidden behind the others'.
    while splits < 8 and blocks * splits < 1.9 * sms and width >= 4 * block * splits:
        splits *= 2
    stage = block * (block_n + rows * (2 if fp8 else 4))
    config = Config(block_n, block, splits, stages=min(max(SHARED_BYTES // stage, 2), 5), weight_first=weight_first)
    return config if config.fits(m, n) else replace(config, splits=1)
