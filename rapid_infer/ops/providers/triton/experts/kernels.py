"""Grouped products over tiles of an ExpertsPlan, and the weighted sum of what they leave.

With ALONE there is no plan: a single token's experts all differ, so choice i is tile i.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.attention.tile import matmul
from rapid_infer.ops.providers.triton.launch import start_next, wait_previous


@triton.jit
def position(program, tiles, blocks, GROUP: tl.constexpr):
    """(tile, block of outputs) of a program: GROUP tiles share what is read of a weight while it is in L2."""
    group = program // (GROUP * blocks)
    first = group * GROUP
    height = tl.minimum(tiles - first, GROUP)
    within = program - first * blocks
    return first + within % height, within // height


@triton.jit
def choices_of(slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tile, M: tl.constexpr, ALONE: tl.constexpr):
    """(expert, sorted places `[M]`, which of them exist, their choices); an expert below zero: nothing to do."""
    row = tl.arange(0, M)
    if ALONE:
        expert = tl.load(slots_ptr + tile)
        place = tile + row
        inside = row < 1
        choice = place
    else:
        expert = tl.load(expert_ptr + tile)
        # Of a tile that is not needed both are whatever the memory held.
        place = tl.load(first_ptr + tile) + row
        inside = (place < tl.load(last_ptr + tile)) & (expert >= 0)
        choice = tl.load(order_ptr + place, mask=inside, other=0)
    return expert, place, inside, choice


@triton.jit
def write(values, out_ptr, row, width, column, inside):
    """`[M, N]` to rows `[M]`, those that are inside, of out `[choices, width]`, and columns `[N]`."""
    to = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(to, values.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["tiles"])
def gate_up_kernel(
    x_ptr, weight_ptr, out_ptr, slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, x_stride, tiles, size, hidden,
    TOP_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[place] = silu(gate x) * (up x)` of each choice's token; out `[choices, size]` in sorted order."""
    start_next(PDL)
    tile, block = position(tl.program_id(0), tiles, tl.cdiv(size, N), GROUP)
    wait_previous(PDL)
    expert, place, inside, choice = choices_of(slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tile, M, ALONE)
    if expert < 0:
        return
    column, k = block * N + tl.arange(0, N), tl.arange(0, K)
    real = column < size
    x_at = x_ptr + (choice // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    gate_at = weight_ptr + expert.to(tl.int64) * 2 * size * hidden + column[None, :] * hidden + k[:, None]
    gate = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    for at in range(0, hidden, K):
        if EVEN_K:
            x = tl.load(x_at + at, mask=inside[:, None], other=0.0)
            w_gate = tl.load(gate_at + at, mask=real[None, :], other=0.0)
            w_up = tl.load(gate_at + size * hidden + at, mask=real[None, :], other=0.0)
        else:
            left = k < hidden - at
            x = tl.load(x_at + at, mask=inside[:, None] & left[None, :], other=0.0)
            w_gate = tl.load(gate_at + at, mask=real[None, :] & left[:, None], other=0.0)
            w_up = tl.load(gate_at + size * hidden + at, mask=real[None, :] & left[:, None], other=0.0)
        gate = matmul(x, w_gate, gate)
        up = matmul(x, w_up, up)
    write(gate * tl.sigmoid(gate) * up, out_ptr, place, size, column, inside)


@triton.jit(do_not_specialize=["tiles"])
def down_kernel(
    x_ptr, weight_ptr, out_ptr, slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tiles, size, hidden,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[choice] = down x[place]`; x `[choices, size]` in sorted order, out `[choices, hidden]` in that of tokens."""
    start_next(PDL)
    tile, block = position(tl.program_id(0), tiles, tl.cdiv(hidden, N), GROUP)
    wait_previous(PDL)
    expert, place, inside, choice = choices_of(slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tile, M, ALONE)
    if expert < 0:
        return
    column, k = block * N + tl.arange(0, N), tl.arange(0, K)
    real = column < hidden
    x_at = x_ptr + place.to(tl.int64)[:, None] * size + k[None, :]
    weight_at = weight_ptr + expert.to(tl.int64) * hidden * size + column[None, :] * size + k[:, None]
    acc = tl.zeros([M, N], tl.float32)
    for at in range(0, size, K):
        if EVEN_K:
            x = tl.load(x_at + at, mask=inside[:, None], other=0.0)
            weight = tl.load(weight_at + at, mask=real[None, :], other=0.0)
        else:
            left = k < size - at
            x = tl.load(x_at + at, mask=inside[:, None] & left[None, :], other=0.0)
            weight = tl.load(weight_at + at, mask=real[None, :] & left[:, None], other=0.0)
        acc = matmul(x, weight, acc)
    write(acc, out_ptr, choice, hidden, column, inside)


@triton.jit
def combine_kernel(
    values_ptr, weights_ptr, slots_ptr, shared_ptr, out_ptr, shared_stride, hidden,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Always added up in the order of a token's choices; values of choices without an expert are never read."""
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    wait_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(TOP_K):
        choice = token * TOP_K + i
        wanted = inside & (tl.load(slots_ptr + choice) >= 0)
        value = tl.load(values_ptr + choice * hidden + column, mask=wanted, other=0.0).to(tl.float32)
        total += value * tl.load(weights_ptr + choice)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=inside)
