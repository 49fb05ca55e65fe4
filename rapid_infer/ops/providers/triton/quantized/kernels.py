"""The product of few tokens and a quantized matrix: stored bytes are read once and become 16-bit values in registers.

The matrix is the left operand, since tensor cores want 64 rows there, which few tokens do not fill. The 16 bytes that a
thread reads at once are what it needs for four steps of the tensor cores, so that values go from memory to them without
changing threads. For that the columns of a line, the 64 bytes of a row that four threads read at once, are multiplied
in another order than they have, to which x is brought as well; the sum is the same.

As in `linear.kernels`, a program computes outputs of all rows over one of SPLITS pieces of K. How scales enter:

* GROUP 0, a scale for a row of the matrix (or several): once, on the sum;
* partial: BLOCK lies within a group, whose sum is multiplied in fp32;
* INNER: groups are smaller; values are multiplied in 16 bits, which is exact for e2m1 and rounds other scales once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.launch import start_next, wait_previous
from rapid_infer.ops.providers.triton.linear.kernels import finish, prefetch
from rapid_infer.ops.providers.triton.quantized.decode import (
    fp4_factor,
    fp4_scale,
    fp4_values,
    fp8_values,
    int4_values,
    int4_zero,
    pair,
)


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
def line_places(BLOCK_N: tl.constexpr, LINES: tl.constexpr, WARPS: tl.constexpr):
    """For each of BLOCK_N * LINES lines, in the order in which threads read them: its row, and which of LINES it is."""
    place = tl.arange(0, BLOCK_N * LINES)
    quad, warp, rest = place % 8, place // 8 % WARPS, place // (8 * WARPS)
    half, line, tile = rest % 2, rest // 2 % LINES, rest // (2 * LINES)
    return (tile * WARPS + warp) * 16 + half * 8 + quad, line


@triton.jit
def as_operand(values, BLOCK_N: tl.constexpr, LINES: tl.constexpr, WARPS: tl.constexpr):
    """Values of words `[lines, 16]`, see `decode`, to `[BLOCK_N, columns]` in the order of `mixed_columns`."""
    TILES: tl.constexpr = BLOCK_N // (16 * WARPS)
    if len(values.shape) == 4:
        split = tl.reshape(values, [TILES, LINES, 2, WARPS, 8, 4, 4, 2, 2])
        return tl.reshape(tl.permute(split, (0, 3, 2, 4, 1, 6, 8, 5, 7)), [BLOCK_N, LINES * 64])
    else:
        split = tl.reshape(values, [TILES, LINES, 2, WARPS, 8, 4, 4, 2, 2, 2])
        return tl.reshape(tl.permute(split, (0, 3, 2, 4, 1, 8, 6, 9, 5, 7)), [BLOCK_N, LINES * 128])


@triton.jit
def mixed_columns(LINES: tl.constexpr, FORM: tl.constexpr):
    """Which column stands where: a thread has a quarter of a line, and tensor cores take two of its values at a time,
    and two more (h) as far away as all threads' have room.
    """
    if FORM == "fp8":
        k = tl.arange(0, LINES * 64)
        j, quarter, h, word = k % 2, k // 2 % 4, k // 8 % 2, k // 16 % 4
        return k // 64 * 64 + quarter * 16 + word * 4 + j * 2 + h
    else:
        k = tl.arange(0, LINES * 128)
        j, quarter, h, word, high = k % 2, k // 2 % 4, k // 8 % 2, k // 16 % 4, k // 64 % 2
        column = k // 128 * 128 + quarter * 32 + high * 16 + word * 4 + h * 2 + j
        # Two lie side by side, which loads may use.
        return tl.max_contiguous(tl.multiple_of(column, 2), 2)


@triton.jit
def mixed_x(x, LINES: tl.constexpr, FORM: tl.constexpr):
    """x `[ROWS, columns]` brought in the order of `mixed_columns`."""
    ROWS: tl.constexpr = x.shape[0]
    if FORM == "fp8":
        split = tl.reshape(x, [ROWS, LINES, 4, 4, 2, 2])
        return tl.reshape(tl.permute(split, (0, 1, 3, 5, 2, 4)), [ROWS, LINES * 64])
    else:
        split = tl.reshape(x, [ROWS, LINES, 4, 2, 4, 2, 2])
        return tl.reshape(tl.permute(split, (0, 1, 3, 4, 5, 2, 6)), [ROWS, LINES * 128])


@triton.jit
def load_groups(at, column, groups, GROUP: tl.constexpr, CODES: tl.constexpr):
    """What is stored for the groups of each line, whose columns begin at `column` `[lines]`: of low codes, and of high
    ones, `[lines, 4]` for its quarters or, where those agree, `[lines, 1]`. `at` points to what rows have first.
    """
    if GROUP == 0 or GROUP % (64 * CODES) == 0:
        low = column[:, None]
    else:
        low = column[:, None] + tl.arange(0, 4)[None, :] * (16 * CODES)
    if GROUP == 0:
        first = tl.load(at[:, None] + low * 0)
        second = first
    else:
        first = tl.load(at[:, None] + tl.minimum(low // GROUP, groups - 1))
        second = first
        if CODES == 2 and GROUP % 32 != 0:
            second = tl.load(at[:, None] + tl.minimum((low + 16) // GROUP, groups - 1))
    return first, second


@triton.jit
def of_words(groups):
    """`[lines, 4]` or `[lines, 1]` to the 16 words of each line."""
    P: tl.constexpr = groups.shape[0]
    C: tl.constexpr = groups.shape[1]
    return tl.reshape(tl.broadcast_to(groups[:, :, None], [P, C, 16 // C]), [P, 16])


@triton.jit
def stored_values(
    word, low, high, zero_low, zero_high,
    FORM: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Values of words, times the scales `low`, `high` if INNER."""
    if FORM == "fp4":
        return fp4_values(word, of_words(fp4_scale(low, DTYPE)), of_words(fp4_scale(high, DTYPE)), DTYPE)
    else:
        if INNER:
            low, high = of_words(pair(low, DTYPE)), of_words(pair(high, DTYPE))
        else:
            low, high = word, word
        if FORM == "fp8":
            return fp8_values(word, low, INNER, DTYPE)
        else:
            if not ZERO:
                zero_low = tl.full([word.shape[0], 1], 8, tl.int32)
                zero_high = zero_low
            zero_low, zero_high = of_words(int4_zero(zero_low, DTYPE)), of_words(int4_zero(zero_high, DTYPE))
            return int4_values(word, zero_low, zero_high, low, high, INNER, DTYPE)


@triton.jit
def load_words(at, place, start, width, EVEN: tl.constexpr):
    """`[lines, 16]` from the line `start` on; zeros behind the end."""
    if EVEN:
        return tl.load(at + start * 16)
    else:
        return tl.load(at + start * 16, mask=place + start * 16 < width, other=0)


@triton.jit
def row_products(
    x_row, used, word_ptr, scale_ptr, zero_ptr, line_row, scale_row, row_scale_at, line, first, K, width, groups,
    iters,
    FORM: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr, ROW_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr, GROUP_N: tl.constexpr,
    ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """fp32 `[BLOCK_N, ROWS]`: `iters` blocks of LINES lines from the line `first` on, of rows of x and of the matrix.

    `x_row` `[ROWS, 1]` points to rows of x, of which those `used` are read; `line_row` is the row of each line (see
    `line_places`), `scale_row` `[BLOCK_N]` that of each output, `row_scale_at` points to its row_scale; `width` is the
    words of four bytes of a row, `groups` its scales. EVEN: they and columns end with the last block. GATHER: columns
    of x are read in their new order, rather than brought in it. ONCE: there is one block, whose weights are asked for
    ahead of the wait for x.
    """
    CODES: tl.constexpr = 1 if FORM == "fp8" else 2
    LINE: tl.constexpr = 64 * CODES
    PARTIAL: tl.constexpr = GROUP > 0 and not INNER
    place = line[:, None] * 16 + tl.arange(0, 16)[None, :]
    at = word_ptr + line_row[:, None] * width + place
    k = mixed_columns(LINES, FORM) if GATHER else tl.arange(0, LINES * LINE)
    column = line * LINE
    line_scale = scale_ptr + line_row // GROUP_N * groups
    line_zero = zero_ptr + line_row * groups
    sum_scale = scale_ptr + scale_row // GROUP_N * groups
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    if ONCE:
        word = load_words(at, place, first, width, EVEN)
    # By hand one ahead: the compiler pipelines no loads as small as these, and would wait for each.
    low, high = load_groups(line_scale, column + first * LINE, groups, GROUP if INNER else 0, CODES)
    zero_low, zero_high = low, high
    if ZERO:
        zero_low, zero_high = load_groups(line_zero, column + first * LINE, groups, GROUP, CODES)
    sum_factor = tl.load(sum_scale)
    if PARTIAL:
        sum_factor = tl.load(sum_scale + tl.minimum(first * LINE // GROUP, groups - 1))
    wait_previous(PDL)
    for i in tl.range(0, 1 if ONCE else iters, num_stages=STAGES):
        start = first + i * LINES
        after = (start + LINES) * LINE
        next_low, next_high = low, high
        next_zero_low, next_zero_high = zero_low, zero_high
        next_factor = sum_factor
        if not ONCE:
            word = load_words(at, place, start, width, EVEN)
            if INNER:
                next_low, next_high = load_groups(line_scale, column + after, groups, GROUP, CODES)
            if ZERO and GROUP > 0:
                next_zero_low, next_zero_high = load_groups(line_zero, column + after, groups, GROUP, CODES)
            if PARTIAL:
                next_factor = tl.load(sum_scale + tl.minimum(after // GROUP, groups - 1))
        if EVEN:
            x = tl.load(x_row + (start * LINE + k)[None, :], mask=used, other=0.0)
        else:
            x = tl.load(x_row + (start * LINE + k)[None, :], mask=used & (start * LINE + k < K)[None, :], other=0.0)
        values = stored_values(word, low, high, zero_low, zero_high, FORM, INNER, ZERO, DTYPE)
        values = as_operand(values, BLOCK_N, LINES, WARPS)
        if WIDE:
            x = x.to(tl.float32)
        if not GATHER:
            x = mixed_x(x, LINES, FORM)
        if PARTIAL:
            part = tl.dot(values, tl.trans(x), tl.zeros([BLOCK_N, ROWS], dtype=tl.float32), input_precision="ieee")
            acc += part * wide_scale(sum_factor)[:, None]
        else:
            acc = tl.dot(values, tl.trans(x), acc, input_precision="ieee")
        low, high = next_low, next_high
        zero_low, zero_high = next_zero_low, next_zero_high
        sum_factor = next_factor
    if GROUP == 0 and not INNER:
        acc = acc * wide_scale(sum_factor)[:, None]
    if ROW_SCALE:
        acc = acc * tl.load(row_scale_at)[:, None]
    return acc * fp4_factor(DTYPE) if FORM == "fp4" else acc


@triton.jit(do_not_specialize=["M", "iters"])
def product_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, row_ptr, out_ptr, partial_ptr, semaphore_ptr,
    M, N, K, width, groups, x_stride, iters,
    FORM: tl.constexpr, GROUP_N: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, WARPS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, ONCE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs `[M, N]` in blocks of ROWS x BLOCK_N. GATED: the matrix has 2 N rows; `silu(x first^T) * x second^T`."""
    start_next(PDL)
    BOTH: tl.constexpr = BLOCK_N * (2 if GATED else 1)
    tiles = tl.cdiv(M, ROWS)
    block = tl.program_id(0) // tiles
    first = tl.program_id(1) * iters * LINES
    place, line = line_places(BOTH, LINES, WARPS)
    output = tl.arange(0, BOTH)
    # Rows past the end are read again rather than masked: their results are not stored.
    if GATED:
        line_row = tl.minimum(block * BLOCK_N + place % BLOCK_N, N - 1) + place // BLOCK_N * N
        rows = tl.minimum(block * BLOCK_N + output % BLOCK_N, N - 1) + output // BLOCK_N * N
    else:
        line_row = tl.minimum(block * BLOCK_N + place, N - 1)
        rows = tl.minimum(block * BLOCK_N + output, N - 1)
    line_row, rows = line_row.to(tl.int64), rows.to(tl.int64)
    if not ONCE:
        prefetch(word_ptr, rows, width, first * 16, AHEAD, 32, PDL)
    m = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    acc = row_products(
        x_ptr + m[:, None].to(tl.int64) * x_stride, (m < M)[:, None], word_ptr, scale_ptr, zero_ptr, line_row, rows,
        row_ptr + rows, line, first, K, width, groups, iters, FORM, GROUP, INNER, ZERO, ROW_SCALE, ROWS, BOTH, LINES,
        WARPS, STAGES, GATHER, EVEN, WIDE, x_ptr.dtype.element_ty, GROUP_N, ONCE, PDL,
    )  # fmt: skip
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        acc, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, ROWS]), (1, 2, 0)))
        acc, up = tl.trans(acc), tl.trans(up)
    else:
        acc = tl.trans(acc)
        up = acc
    finish(
        acc, up, out_ptr, out_ptr, partial_ptr, semaphore_ptr, m, n, M, N, BLOCK_N, SPLITS, GATED, False
    )  # fmt: skip
