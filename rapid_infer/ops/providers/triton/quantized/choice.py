"""Which configuration a quantized product of few tokens gets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from rapid_infer.ops.providers.triton.quantized.config import Config, padded_rows
from rapid_infer.ops.providers.triton.quantized.tuned import TUNED
from rapid_infer.ops.quantized import QuantizedMatrix

MAX_ROWS = {"fp8": 64, "int4": 512, "fp4": 512}
"""With more tokens arithmetic takes the time: FP8 has tensor cores of its own, 4 bits are written out in 16."""

LINE = 64
"""Bytes of a row in a step of the kernel's layout."""

SHARED_BYTES = 100_000
"""For the stages of a program: two fit a multiprocessor."""


def codes_of(form: str) -> int:
    """Values of a byte."""
    return 1 if form == "fp8" else 2


def is_inner(form: str, group: int) -> bool:
    """Whether scales must be multiplied into the values."""
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
    lines = 8
    while group and not is_inner(form, group) and group % (lines * LINE * codes_of(form)):
        lines //= 2
    return lines


@cache
def choose(form: str, n: int, k: int, m: int, group: int, sms: int, gated: bool = False) -> Config | None:
    """For x `[m, k]` and a matrix `[n, k]` (gated: `[2 n, k]`) on a device of `sms` multiprocessors; None: others."""
    if not 1 <= m <= MAX_ROWS[form]:
        return None
    rows, width = padded_rows(m), -(-k // (LINE * codes_of(form)))
    # What was not measured does as what was: floats in groups of 16 as in groups of 32, other rows as 32.
    measured_group = 32 if form == "fp4" else group
    for measured in (m if m == 1 else rows, 32) if rows <= 64 else ():
        config = TUNED.get((form, measured_group, n, k, measured, gated))
        if config is not None and config.fits(m, n, gated):
            return config
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
