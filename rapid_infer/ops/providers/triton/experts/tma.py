"""The grouped products of `kernels.py` for tiles of many choices, with weights that TMA copies.

A program takes one (tile, block of outputs) after another, and copies for the next while it ends the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.attention.tile import matmul
from rapid_infer.ops.providers.triton.experts.kernels import choices_of, position, write
from rapid_infer.ops.providers.triton.launch import start_next, wait_previous

_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _needed(expert_ptr, tiles):
    """How many of the tiles are needed; they are the first."""
    count = tiles * 0
    for at in range(0, tiles, _AT_ONCE):
        tile = at + tl.arange(0, _AT_ONCE)
        expert = tl.load(expert_ptr + tile, mask=tile < tiles, other=-1)
        count += tl.sum((expert >= 0).to(tl.int32))
    return count


@triton.jit(do_not_specialize=["tiles"])
def gate_up_tma_kernel(
    x_ptr, weight, out_ptr, slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, x_stride, tiles, size, hidden,
    TOP_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`weight` describes `[experts * 2, size, hidden]` in tiles `[2, N, K]`: gate and up are one product."""
    start_next(PDL)
    first, blocks = tl.program_id(0), tl.cdiv(size, N)
    wait_previous(PDL)
    tiles = _needed(expert_ptr, tiles)
    ended = first
    # The loops become one only if no bound of the inner depends on the outer: hence no tile that is not needed.
    for program in tl.range(first, tiles * blocks, tl.num_programs(0), flatten=True):
        tile, block = position(program, tiles, blocks, GROUP)
        expert, place, inside, choice = choices_of(
            slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tile, M, False
        )
        k = tl.arange(0, K)
        x_at = x_ptr + (choice // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
        both = tl.zeros([M, 2 * N], tl.float32)
        for at in range(0, hidden, K):
            if EVEN_K:
                x = tl.load(x_at + at, mask=inside[:, None], other=0.0)
            else:
                x = tl.load(x_at + at, mask=inside[:, None] & (k < hidden - at)[None, :], other=0.0)
            both = matmul(x, weight.load([2 * expert, block * N, at]).reshape(2 * N, K).T, both)
        # Found again, as every stage of the one loop would have to keep it.
        tile, block = position(ended, tiles, blocks, GROUP)
        _, place, inside, _ = choices_of(slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tile, M, False)
        ended += tl.num_programs(0)
        gate, up = both.reshape(M, 2, N).permute(0, 2, 1).split()
        write(gate * tl.sigmoid(gate) * up, out_ptr, place, size, block * N + tl.arange(0, N), inside)


@triton.jit(do_not_specialize=["tiles"])
def down_tma_kernel(
    x, weight, out_ptr, slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tiles, size, hidden,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`x` describes `[choices, size]` in tiles `[M, K]`, `weight` `[experts, hidden, size]` in tiles `[1, N, K]`.

    Rows of x after a tile's last are another expert's, or whatever the memory held; their results are not written.
    """
    start_next(PDL)
    first, blocks = tl.program_id(0), tl.cdiv(hidden, N)
    wait_previous(PDL)
    tiles = _needed(expert_ptr, tiles)
    ended = first
    for program in tl.range(first, tiles * blocks, tl.num_programs(0), flatten=True):
        tile, block = position(program, tiles, blocks, GROUP)
        expert, row = tl.load(expert_ptr + tile), tl.load(first_ptr + tile)
        acc = tl.zeros([M, N], tl.float32)
        for at in range(0, size, K):
            acc = matmul(x.load([row, at]), weight.load([expert, block * N, at]).reshape(N, K).T, acc)
        tile, block = position(ended, tiles, blocks, GROUP)
        ended += tl.num_programs(0)
        _, _, inside, choice = choices_of(slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tile, M, False)
        write(acc, out_ptr, choice, hidden, block * N + tl.arange(0, N), inside)
