"""The product of one token and an FP8 matrix, in plain fp32 arithmetic: 16 bytes of a row are a thread's.

They have one scale, which meets their sum. (Of 4-bit codes the arithmetic would take longer than reading them.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.launch import start_next, wait_previous
from rapid_infer.ops.providers.triton.linear.kernels import finish
from rapid_infer.ops.providers.triton.quantized.kernels import wide_scale

CHUNK = tl.constexpr(16)


@triton.jit
def _tile(values_ptr, rows, chunk, width, EVEN: tl.constexpr):
    """`[BLOCK_N, CHUNKS, 16]` bytes."""
    byte = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = values_ptr + rows[:, None, None] * width + byte[None, :, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(byte < width)[None, :, :], other=0.0)


@triton.jit
def _inputs(x_ptr, column, K):
    """`[CHUNKS, 16]` inputs from the columns `[CHUNKS]` on, fp32."""
    column = column[:, None] + tl.arange(0, CHUNK)[None, :]
    return tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def _sums(tile, x_ptr, scale_at, chunk, K, GROUP: tl.constexpr):
    """`[BLOCK_N, CHUNKS]`."""
    column = chunk * CHUNK
    part = tl.sum(tile.to(tl.float32) * _inputs(x_ptr, column, K)[None, :, :], axis=2)
    if GROUP == 0:
        return part
    else:
        group = tl.minimum(column, K - 1) // GROUP
        return part * wide_scale(tl.load(scale_at[:, None] + group[None, :]))


@triton.jit(do_not_specialize=["M", "iters"])
def gemv_kernel(
    x_ptr, values_ptr, scale_ptr, out_ptr, partial_ptr, semaphore_ptr,
    M, N, K, width, groups, x_stride, iters,
    GROUP_N: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, LOOP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first tile is loaded ahead of the wait; without LOOP it is the only one."""
    start_next(PDL)
    first = tl.program_id(1) * iters * CHUNKS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    scale_at = scale_ptr + rows // GROUP_N * groups
    chunk = first + tl.arange(0, CHUNKS)
    tile = _tile(values_ptr, rows, chunk, width, EVEN)
    wait_previous(PDL)
    acc = _sums(tile, x_ptr, scale_at, chunk, K, GROUP)
    if LOOP:
        for i in tl.range(1, iters, num_stages=STAGES):
            chunk = first + i * CHUNKS + tl.arange(0, CHUNKS)
            tile = _tile(values_ptr, rows, chunk, width, EVEN)
            acc += _sums(tile, x_ptr, scale_at, chunk, K, GROUP)
    total = tl.sum(acc, axis=1)
    if GROUP == 0:
        total = total * wide_scale(tl.load(scale_at))
    total = total[None, :]
    finish(
        total, total, out_ptr, out_ptr, partial_ptr, semaphore_ptr, tl.arange(0, 1), n, M, N, BLOCK_N, SPLITS,
        False, False,
    )  # fmt: skip
