"""A quantized matrix written out in 16 or 32 bits, for products of many tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.quantized.choice import inner_group
from rapid_infer.ops.providers.triton.quantized.decode import byte_of, e2m1, e4m3, eight, four
from rapid_infer.ops.providers.triton.quantized.kernels import wide_scale
from rapid_infer.ops.quantized import QuantizedMatrix

BLOCK_N, LINES = 64, 2
"""Rows and lines of 64 bytes of a program."""


@triton.jit
def _dequantize_kernel(
    word_ptr, scale_ptr, zero_ptr, row_ptr, out_ptr, N, K, width, groups, scales_of_expert,
    FORM: tl.constexpr, GROUP_N: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ROW_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    CODES: tl.constexpr = 1 if FORM == "fp8" else 2
    COLUMNS: tl.constexpr = 64 * CODES
    PLACES: tl.constexpr = BLOCK_N * LINES
    # Sixteen columns have one scale, if groups are no smaller.
    COUNT: tl.constexpr = COLUMNS // 16 if GROUP % 16 == 0 else COLUMNS
    lines = tl.arange(0, PLACES)
    expert = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + lines // LINES
    line = tl.program_id(1) * LINES + lines % LINES
    place = line[:, None] * 16 + tl.arange(0, 16)[None, :]
    row = expert * N + n
    wait_previous(PDL)
    inside = (n < N)[:, None]
    word = tl.load(word_ptr + row[:, None] * width + place, mask=inside & (place < width), other=0)
    part = line[:, None] * COLUMNS + tl.arange(0, COUNT)[None, :] * (COLUMNS // COUNT)
    used = inside & (part < K)
    group = part // GROUP if GROUP > 0 else part * 0
    at = (scales_of_expert * expert + n // GROUP_N * groups)[:, None] + group
    c0, c1, c2, c3 = byte_of(word, 0), byte_of(word, 1), byte_of(word, 2), byte_of(word, 3)
    if FORM == "fp8":
        values = four(e4m3(c0), e4m3(c1), e4m3(c2), e4m3(c3))
    else:
        values = eight(c0 & 15, c1 & 15, c2 & 15, c3 & 15, c0 >> 4, c1 >> 4, c2 >> 4, c3 >> 4)
        values = tl.permute(tl.reshape(values, [PLACES, 4, 4, 2, 2, 2]), (0, 1, 4, 2, 5, 3))
        values = values.to(tl.float32) if FORM == "int4" else e2m1(values)
    values = tl.reshape(values, [PLACES, COUNT, COLUMNS // COUNT])
    if FORM == "int4":
        zero = tl.full([PLACES, COUNT], 8.0, tl.float32)
        if ZERO:
            zero = tl.load(zero_ptr + at, mask=used, other=0).to(tl.float32)
        values -= zero[:, :, None]
    values *= wide_scale(tl.load(scale_ptr + at, mask=used))[:, :, None]
    if ROW_SCALE:
        values *= tl.load(row_ptr + row, mask=n < N, other=0.0)[:, None, None]
    column = line[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.reshape(values, [PLACES, COLUMNS]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * K + column, values, mask=inside & (column < K))


def tensors_of(matrix: QuantizedMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """values in words of four bytes, scale, zero, row_scale, as kernels take them: scales where there is none."""
    scale = matrix.scale.view(torch.uint8) if matrix.scale.dtype is torch.float8_e8m0fnu else matrix.scale
    zero, row_scale = (scale if part is None else part for part in (matrix.zero, matrix.row_scale))
    return matrix.values.view(torch.int32), scale, zero, row_scale


def constants_of(matrix: QuantizedMatrix) -> dict[str, Any]:
    return {
        "FORM": matrix.form,
        "GROUP_N": matrix.group[0],
        "GROUP": inner_group(matrix),
        "ZERO": matrix.zero is not None,
        "ROW_SCALE": matrix.row_scale is not None,
    }


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    n, k = matrix.shape
    *stack, _, width = matrix.values.view(torch.int32).shape
    out = torch.empty(*stack, n, k, dtype=dtype, device=matrix.values.device)
    experts = stack[0] if stack else 1
    tensors = [part.contiguous() for part in tensors_of(matrix)]
    _dequantize_kernel[(triton.cdiv(n, BLOCK_N), triton.cdiv(width, 16 * LINES), experts)](
        *tensors, out, n, k, width, matrix.scale.shape[-1], matrix.scale.shape[-2] * matrix.scale.shape[-1],
        **constants_of(matrix), BLOCK_N=BLOCK_N, LINES=LINES, num_warps=4, **options(out),
    )  # fmt: skip
    return out
