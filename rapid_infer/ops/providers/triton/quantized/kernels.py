"""The product of few tokens and a quantized matrix: stored bytes are read once and become 16-bit values in registers.

As in `linear.kernels`, a program computes BLOCK_N outputs of all rows over one of SPLITS pieces of K. How scales enter:

* GROUP 0, a scale for a row of the matrix (or several): once, on the sum;
* partial: BLOCK lies within a group, whose sum is multiplied in fp32;
* INNER: groups are smaller; values are multiplied in 16 bits, which is exact for e2m1 and rounds codes of int4 once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.launch import start_next, wait_previous
from rapid_infer.ops.providers.triton.linear.kernels import finish, prefetch
from rapid_infer.ops.providers.triton.quantized.decode import (
    fp4_factor,
    fp4_values,
    fp8_values,
    inner_scale,
    int4_values,
    scaled,
)

HALF = tl.constexpr(64)
"""Bytes of a packed block, see `ops.quantized.PACKED`."""


@triton.jit
def wide_scale(value):
    """A stored scale in fp32; bytes are e8m0."""
    if value.dtype == tl.uint8:
        # The exponent's own bits, and for 0, which those cannot say, a subnormal.
        bits = value.to(tl.int32)
        return tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def first_column(byte):
    """Of packed bytes, the column of the low code; the high one's is 64 further."""
    return byte // HALF * (2 * HALF) + byte % HALF


@triton.jit
def load_bytes(values_ptr, rows, byte, width, EVEN: tl.constexpr):
    """`[BLOCK_N, BLOCK]` of rows of `width` bytes, zeros behind the end."""
    at = values_ptr + rows[:, None] * width + byte[None, :]
    if EVEN:
        return tl.load(at)
    elif at.dtype.element_ty == tl.uint8:
        return tl.load(at, mask=(byte < width)[None, :], other=0)
    else:
        return tl.load(at, mask=(byte < width)[None, :], other=0.0)


@triton.jit
def load_x(x_row, column, used, K, EVEN: tl.constexpr, WIDE: tl.constexpr):
    """`[ROWS, BLOCK]`, zeros where a row is not used or a column behind the end."""
    inside = used if EVEN else used & (column < K)[None, :]
    x = tl.load(x_row + column[None, :], mask=inside, other=0.0)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def multiply(x, values, acc, WEIGHT_FIRST: tl.constexpr):
    """acc + x values^T, or its transpose."""
    if WEIGHT_FIRST:
        return tl.dot(values, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(values), acc, input_precision="ieee")


@triton.jit
def along(scale, WEIGHT_FIRST: tl.constexpr):
    """A scale of outputs `[BLOCK_N]`, to multiply an accumulator."""
    return scale[:, None] if WEIGHT_FIRST else scale[None, :]


@triton.jit
def load_groups(at, start, groups, FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """What is stored `[BLOCK_N, COUNT]` for the groups of BLOCK bytes from `start` on: of low codes, and of high ones.

    `at` points to each row's first.
    """
    byte = start + tl.arange(0, COUNT) * (BLOCK // COUNT)
    if GROUP == 0:
        low = byte * 0
        high = low
    elif FORM == "fp8":
        low = tl.minimum(byte // GROUP, groups - 1)
        high = low
    else:
        low = tl.minimum(first_column(byte) // GROUP, groups - 1)
        high = tl.minimum((first_column(byte) + HALF) // GROUP, groups - 1)
    first = tl.load(at[:, None] + low[None, :])
    second = first
    if FORM != "fp8" and GROUP % 128 != 0:
        second = tl.load(at[:, None] + high[None, :])
    return first, second


@triton.jit
def one_scale(scale, WEIGHT_FIRST: tl.constexpr, BLOCK_N: tl.constexpr):
    """`[BLOCK_N, 1]` as stored, to multiply an accumulator."""
    return along(wide_scale(tl.reshape(scale, [BLOCK_N])), WEIGHT_FIRST)


@triton.jit
def accumulate_fp8(
    acc, zeros, x_row, used, values_ptr, scale, rows, start, K, width,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, WEIGHT_FIRST: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """acc + the product of BLOCK columns from `start` on, which have `scale`."""
    byte = start + tl.arange(0, BLOCK)
    values = fp8_values(load_bytes(values_ptr, rows, byte, width, EVEN), DTYPE)
    x = load_x(x_row, byte, used, K, EVEN, WIDE)
    if GROUP == 0:
        return multiply(x, values, acc, WEIGHT_FIRST)
    else:
        return acc + multiply(x, values, zeros, WEIGHT_FIRST) * one_scale(scale, WEIGHT_FIRST, BLOCK_N)


@triton.jit
def accumulate_packed(
    acc, zeros, x_row, used, values_ptr, scale_low, scale_high, zero_low, zero_high, rows, start, K, width,
    FORM: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, WEIGHT_FIRST: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The same of BLOCK bytes of two codes each; COUNT groups stand along each half of them."""
    byte = start + tl.arange(0, BLOCK)
    column = first_column(byte)
    tile = load_bytes(values_ptr, rows, byte, width, EVEN)
    if FORM == "int4":
        if ZERO:
            low, high = zero_low.to(tl.float32), zero_high.to(tl.float32)
        else:
            low = tl.full([BLOCK_N, COUNT], 8.0, tl.float32)
            high = low
        first, second = int4_values(tile, low, high, BLOCK_N, BLOCK, COUNT, DTYPE)
    else:
        first, second = fp4_values(tile, DTYPE)
    x_first = load_x(x_row, column, used, K, EVEN, WIDE)
    x_second = load_x(x_row, column + HALF, used, K, EVEN, WIDE)
    if INNER:
        first = scaled(first, inner_scale(scale_low, FORM, DTYPE), BLOCK_N, BLOCK, COUNT, DTYPE)
        second = scaled(second, inner_scale(scale_high, FORM, DTYPE), BLOCK_N, BLOCK, COUNT, DTYPE)
    if INNER or GROUP == 0:
        return multiply(x_second, second, multiply(x_first, first, acc, WEIGHT_FIRST), WEIGHT_FIRST)
    else:
        part = multiply(x_first, first, zeros, WEIGHT_FIRST)
        scale = one_scale(scale_low, WEIGHT_FIRST, BLOCK_N)
        if GROUP % 128 == 0:
            return acc + multiply(x_second, second, part, WEIGHT_FIRST) * scale
        else:
            acc += part * scale
            part = multiply(x_second, second, zeros, WEIGHT_FIRST)
            return acc + part * one_scale(scale_high, WEIGHT_FIRST, BLOCK_N)


@triton.jit
def row_products(
    x_row, used, values_ptr, scale_at, zero_at, row_at, rows, first, K, width, groups, iters,
    FORM: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr, ROW_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """fp32 `[ROWS, BLOCK_N]`: `iters` blocks of bytes from `first` on, of rows of x and `rows` of the matrix.

    `x_row` `[ROWS, 1]` points to rows of x, of which those `used` are read; `scale_at`, `zero_at`, `row_at` `[BLOCK_N]`
    to what each row of the matrix has first; `width` is the bytes of such a row, `groups` its scales. EVEN: bytes and
    columns end with the last block.
    """
    zeros = tl.zeros([BLOCK_N, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK_N], dtype=tl.float32)
    acc = zeros
    scale_low, scale_high = load_groups(scale_at, first, groups, FORM, GROUP, BLOCK, COUNT)
    zero_low, zero_high = scale_low, scale_high
    if ZERO:
        zero_low, zero_high = load_groups(zero_at, first, groups, FORM, GROUP, BLOCK, COUNT)
    for i in tl.range(0, iters, num_stages=STAGES):
        start = first + i * BLOCK
        # By hand one ahead: the compiler pipelines no loads as small as these, and would wait for each.
        next_low, next_high = scale_low, scale_high
        if GROUP > 0:
            next_low, next_high = load_groups(scale_at, start + BLOCK, groups, FORM, GROUP, BLOCK, COUNT)
        next_zero_low, next_zero_high = zero_low, zero_high
        if ZERO and GROUP > 0:
            next_zero_low, next_zero_high = load_groups(zero_at, start + BLOCK, groups, FORM, GROUP, BLOCK, COUNT)
        if FORM == "fp8":
            acc = accumulate_fp8(
                acc, zeros, x_row, used, values_ptr, scale_low, rows, start, K, width,
                GROUP, BLOCK_N, BLOCK, WEIGHT_FIRST, EVEN, WIDE, DTYPE,
            )  # fmt: skip
        else:
            acc = accumulate_packed(
                acc, zeros, x_row, used, values_ptr, scale_low, scale_high, zero_low, zero_high, rows, start, K, width,
                FORM, GROUP, INNER, ZERO, BLOCK_N, BLOCK, COUNT, WEIGHT_FIRST, EVEN, WIDE, DTYPE,
            )  # fmt: skip
        scale_low, scale_high = next_low, next_high
        zero_low, zero_high = next_zero_low, next_zero_high
    if GROUP == 0 and not INNER:
        acc = acc * along(wide_scale(tl.load(scale_at)), WEIGHT_FIRST)
    if ROW_SCALE:
        acc = acc * along(tl.load(row_at), WEIGHT_FIRST)
    if FORM == "fp4":
        acc = acc * fp4_factor(DTYPE)
    return tl.trans(acc) if WEIGHT_FIRST else acc


@triton.jit(do_not_specialize=["M", "iters"])
def product_kernel(
    x_ptr, values_ptr, scale_ptr, zero_ptr, row_ptr, out_ptr, partial_ptr, semaphore_ptr,
    M, N, K, width, groups, x_stride, iters,
    FORM: tl.constexpr, GROUP_N: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, WEIGHT_FIRST: tl.constexpr, EVEN: tl.constexpr, LINES: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * iters * BLOCK
    # Rows past the end are read again rather than masked: their results are not stored.
    rows = tl.minimum(n, N - 1).to(tl.int64)
    prefetch(values_ptr, rows, width, first, LINES, 128, PDL)
    wait_previous(PDL)
    m = tl.arange(0, ROWS)
    acc = row_products(
        x_ptr + m[:, None].to(tl.int64) * x_stride, (m < M)[:, None], values_ptr,
        scale_ptr + rows // GROUP_N * groups, zero_ptr + rows * groups, row_ptr + rows, rows, first, K, width, groups,
        iters, FORM, GROUP, INNER, ZERO, ROW_SCALE, ROWS, BLOCK_N, BLOCK, COUNT, STAGES, WEIGHT_FIRST, EVEN, WIDE,
        x_ptr.dtype.element_ty,
    )  # fmt: skip
    finish(
        acc, acc, out_ptr, out_ptr, partial_ptr, semaphore_ptr, m, n, M, N, BLOCK_N, SPLITS, False, False
    )  # fmt: skip
