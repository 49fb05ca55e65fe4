"""A quantized matrix written out in 16 or 32 bits, for products of many tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.quantized.choice import inner_group
from rapid_infer.ops.providers.triton.quantized.kernels import HALF, first_column, wide_scale
from rapid_infer.ops.quantized import QuantizedMatrix

BLOCK_N, BLOCK = 16, 128


@triton.jit
def _e2m1(code):
    """In fp32: its three bits as the last of the exponent and the first of the mantissa, off by 2^126."""
    code = code.to(tl.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = tl.where(exponent == 0, mantissa * 2, (2 + mantissa) << exponent).to(tl.float32) * 0.25
    return tl.where(code > 7, -size, size)


@triton.jit
def _dequantize_kernel(
    values_ptr, scale_ptr, zero_ptr, row_ptr, out_ptr, N, K, width, groups, scales_of_expert,
    FORM: tl.constexpr, GROUP_N: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ROW_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    expert = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (byte < width)[None, :]
    row = expert * N + n
    at = scales_of_expert * expert + n // GROUP_N * groups
    wait_previous(PDL)
    tile = tl.load(values_ptr + row[:, None] * width + byte[None, :], mask=inside, other=0)
    row_scale = tl.full([BLOCK_N], 1.0, tl.float32)
    if ROW_SCALE:
        row_scale = tl.load(row_ptr + row, mask=n < N, other=0.0)
    to = out_ptr + row[:, None] * K
    HALVES: tl.constexpr = 1 if FORM == "fp8" else 2
    for half in tl.static_range(HALVES):
        column = byte if FORM == "fp8" else first_column(byte) + half * HALF
        used = inside & (column < K)[None, :]
        group = column // GROUP if GROUP > 0 else column * 0
        place = at[:, None] + group[None, :]
        if FORM == "fp8":
            values = tile.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif FORM == "int4":
            zero = 8.0
            if ZERO:
                zero = tl.load(zero_ptr + place, mask=used, other=0).to(tl.float32)
            values = ((tile >> (4 * half)) & 15).to(tl.float32) - zero
        else:
            values = _e2m1((tile >> (4 * half)) & 15)
        values *= wide_scale(tl.load(scale_ptr + place, mask=used))
        if ROW_SCALE:
            values *= row_scale[:, None]
        tl.store(to + column[None, :], values.to(out_ptr.dtype.element_ty), mask=used)


def tensors_of(matrix: QuantizedMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """values in bytes, scale, zero and row_scale, as kernels take them: another stands for what there is not."""
    scale = matrix.scale.view(torch.uint8) if matrix.scale.dtype is torch.float8_e8m0fnu else matrix.scale
    zero, row_scale = (scale if part is None else part for part in (matrix.zero, matrix.row_scale))
    return matrix.values.view(torch.uint8), scale, zero, row_scale


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
    *stack, _, width = matrix.values.shape
    out = torch.empty(*stack, n, k, dtype=dtype, device=matrix.values.device)
    experts = stack[0] if stack else 1
    tensors = [part.contiguous() for part in tensors_of(matrix)]
    _dequantize_kernel[(triton.cdiv(n, BLOCK_N), triton.cdiv(width, BLOCK), experts)](
        *tensors, out, n, k, width, matrix.scale.shape[-1], matrix.scale.shape[-2] * matrix.scale.shape[-1],
        **constants_of(matrix), BLOCK_N=BLOCK_N, BLOCK=BLOCK, num_warps=4, **options(out),
    )  # fmt: skip
    return out
