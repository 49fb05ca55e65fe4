"""Which configuration a quantized product of few tokens gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from rapid_infer.ops.providers.triton.linear.config import PARTIALS, SEMAPHORES
from rapid_infer.ops.quantized import QuantizedMatrix

MAX_ROWS = {"fp8": 64, "int4": 512, "fp4": 512}
"""With more tokens arithmetic takes the time: FP8 has tensor cores of its own, 4 bits are written out in 16."""

LINE = 64
"""Bytes of a row in a step of the kernel's layout."""

SHARED_BYTES = 100_000
"""For the stages of a program: two fit a multiprocessor."""


@dataclass(frozen=True)
class Config:
    """block_n outputs and, at a time, 64 `lines` bytes of each row of the matrix; otherwise as `linear.config.Config`.

    A warp has 16 rows of the matrix, or several times as many; a gated product has two rows for an output. gather: x is
    read in the order in which it is multiplied, by small loads, rather than brought in it.
    """

    block_n: int
    lines: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 4
    gather: bool = False

    def fits(self, m: int, n: int, gated: bool = False) -> bool:
        """Whether the workspace holds the partial sums of `[m, n]` outputs, and warps divide the rows."""
        if self.block_n * (1 + gated) % (16 * self.warps):
            return False
        programs = -(-n // self.block_n) * -(-m // padded_rows(m))
        return self.splits == 1 or (self.splits * m * n * (1 + gated) <= PARTIALS and programs <= SEMAPHORES)


def padded_rows(m: int) -> int:
    """Tokens of a program for m in all."""
    return next((rows for rows in (16, 32, 64) if m <= rows), 128)


def codes_of(form: str) -> int:
    """Values of a byte."""
    return 1 if form == "fp8" else 2


def is_inner(form: str, group: int) -> bool:
    """Whether scales are multiplied into the values."""
    return form == "fp4" or group % (LINE * codes_of(form)) != 0


def inner_group(matrix: QuantizedMatrix) -> int:
    """Columns that share a scale, 0: all of a row."""
    return 0 if matrix.scale.shape[-1] == 1 else matrix.group[1]


def cannot_multiply(matrix: QuantizedMatrix, dtype: torch.dtype, wide: bool) -> bool:
    """Whether the kernel cannot take it. `wide`: it multiplies in fp32."""
    group, form = inner_group(matrix), matrix.form
    if (dtype is torch.float32 and not wide) or matrix.shape[1] % 16 or group % 16 or matrix.values.dim() != 2:
        return True
    if not (matrix.values.is_contiguous() and matrix.scale.is_contiguous()):
        return True
    if dtype is torch.float16 and is_inner(form, group) and form != "int4":
        # The range of e8m0, or of what fp8 is multiplied by, is not that of fp16.
        return form == "fp8" or (matrix.scale.element_size() == 1 and matrix.scale.dtype is not torch.float8_e4m3fn)
    return False


def most_lines(form: str, group: int) -> int:
    """The most that may be taken at a time: those of a group, where its sum is multiplied."""
    lines = 4
    while group and not is_inner(form, group) and group % (lines * LINE * codes_of(form)):
        lines //= 2
    return lines


@cache
def choose(form: str, n: int, k: int, m: int, group: int, sms: int, gated: bool = False) -> Config | None:
    """For x `[m, k]` and a matrix `[n, k]` (gated: `[2 n, k]`) on a device of `sms` multiprocessors; None: others."""
    if not 1 <= m <= MAX_ROWS[form]:
        return None
    rows, width = padded_rows(m), -(-k // (LINE * codes_of(form)))
    both = 64 if form == "fp8" or rows > 64 else 128
    lines = min(most_lines(form, group), 2)
    block_n = both // (1 + gated)
    splits, blocks = 1, -(-n // block_n) * -(-m // rows)
    # Enough programs for the latency of each to be hidden behind the others'.
    while splits < 8 and blocks * splits < 1.9 * sms and width >= 4 * lines * splits:
        splits *= 2
    stage = lines * LINE * (both + 2 * codes_of(form) * rows)
    config = Config(block_n, lines, splits, stages=min(max(SHARED_BYTES // stage, 2), 5))
    return config if config.fits(m, n, gated) else replace(config, splits=1)
