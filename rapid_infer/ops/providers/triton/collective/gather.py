"""All-gather by the same protocol: words of any type instead of sums of floats."""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.collective.protocol import (
    begin_call,
    clear,
    end_call,
    peer_addresses,
    push,
    report,
    slot_of,
    slots_at,
    to_words,
)
from rapid_infer.ops.providers.triton.launch import start_next, wait_previous

ZERO = tl.constexpr(-(1 << 31))
"""How a word of zeros travels: as the bits of -0."""


@triton.jit(do_not_specialize=["rank", "max_polls"])
def all_gather_kernel(
    ptrs_ptr, state_ptr, error_ptr, rank, slot, max_polls, x_ptr, out_ptr, size, out_stride,
    WORLD: tl.constexpr, PUSH: tl.constexpr, COLLECT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK words of int32. A word of -2^31 arrives as zero."""
    start_next(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    addresses = peer_addresses(ptrs_ptr, rank, WORLD)
    wait_previous(PDL)
    epoch, polls = begin_call(state_ptr, max_polls)
    words = to_words(tl.load(x_ptr + offset, mask=inside, other=0))
    if PUSH:
        push(addresses, epoch, rank, slot, offset, words, inside, WORLD)
    if COLLECT:
        tl.debug_barrier()
        mine = slots_at(addresses[0], epoch, slot, words, WORLD)
        late = 1
        looks = 0
        while (late != 0) & (looks < polls):
            lacking = tl.zeros(offset.shape, tl.int32)
            for peer in tl.static_range(WORLD):
                there = inside & (rank != peer)
                seen = tl.load(slot_of(mine, peer, slot) + offset, mask=there, other=1, volatile=True)
                lacking |= (seen == 0).to(tl.int32) << peer
            late = tl.max(lacking, axis=0)
            looks += 1
        report(late, state_ptr, error_ptr)
        for peer in tl.static_range(WORLD):
            got = tl.load(slot_of(mine, peer, slot) + offset, mask=inside & (rank != peer), other=words, volatile=True)
            tl.store(out_ptr + peer * out_stride.to(tl.int64) + offset, tl.where(got == ZERO, 0, got), mask=inside)
        clear(mine, rank, slot, offset, inside, WORLD)
        end_call(state_ptr)
