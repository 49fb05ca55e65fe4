"""All-reduce in which each rank sends all it has to all others, alone and with what comes after it in a layer."""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.collective.protocol import (
    begin_call,
    clear,
    end_call,
    peer_addresses,
    push,
    slots_at,
    to_words,
    wait_and_sum,
    without_minus_zero,
)
from rapid_infer.ops.providers.triton.launch import start_next, wait_previous
from rapid_infer.ops.providers.triton.norm import weigh


@triton.jit(do_not_specialize=["rank", "max_polls"])
def all_reduce_kernel(
    ptrs_ptr, state_ptr, error_ptr, rank, slot, max_polls, x_ptr, out_ptr, size,
    WORLD: tl.constexpr, PUSH: tl.constexpr, COLLECT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK elements."""
    start_next(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    addresses = peer_addresses(ptrs_ptr, rank, WORLD)
    wait_previous(PDL)
    epoch, polls = begin_call(state_ptr, max_polls)
    words = to_words(tl.load(x_ptr + offset, mask=inside, other=0.0))
    if PUSH:
        push(addresses, epoch, rank, slot, offset, words, inside, WORLD)
    if COLLECT:
        # The stores are under way before the first look.
        tl.debug_barrier()
        dtype = x_ptr.dtype.element_ty
        mine = slots_at(addresses[0], epoch, slot, words, WORLD)
        total = wait_and_sum(mine, words, rank, slot, offset, inside, state_ptr, error_ptr, polls, dtype, WORLD)
        clear(mine, rank, slot, offset, inside, WORLD)
        end_call(state_ptr)
        tl.store(out_ptr + offset, without_minus_zero(total.to(dtype)), mask=inside)


@triton.jit(do_not_specialize=["rank", "max_polls"])
def all_reduce_add_rms_norm_kernel(
    ptrs_ptr, state_ptr, error_ptr, rank, slot, max_polls,
    x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr, size, eps,
    WORLD: tl.constexpr, PUSH: tl.constexpr, COLLECT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row; rounds where `all_reduce_kernel` and then the norm kernel do."""
    start_next(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < size
    offset = tl.program_id(0) * size + column
    addresses = peer_addresses(ptrs_ptr, rank, WORLD)
    if COLLECT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_previous(PDL)
    epoch, polls = begin_call(state_ptr, max_polls)
    words = to_words(tl.load(x_ptr + offset, mask=inside, other=0.0))
    if PUSH:
        push(addresses, epoch, rank, slot, offset, words, inside, WORLD)
    if COLLECT:
        residual = tl.load(residual_ptr + offset, mask=inside, other=0.0)
        tl.debug_barrier()
        dtype = x_ptr.dtype.element_ty
        mine = slots_at(addresses[0], epoch, slot, words, WORLD)
        total = wait_and_sum(mine, words, rank, slot, offset, inside, state_ptr, error_ptr, polls, dtype, WORLD)
        clear(mine, rank, slot, offset, inside, WORLD)
        end_call(state_ptr)
        x = without_minus_zero(total.to(dtype)).to(tl.float32) + residual.to(tl.float32)
        x = x.to(dtype)
        tl.store(residual_out_ptr + offset, x, mask=inside)
        x = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / size + eps)
        tl.store(out_ptr + offset, weigh(x, scale, weight.to(tl.float32), dtype), mask=inside)
