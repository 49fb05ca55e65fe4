"""All-reduce in which each rank sums one chunk and sends the sum to all others."""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.collective.protocol import (
    begin_call,
    clear,
    end_call,
    peer_addresses,
    push,
    slot_of,
    slots_at,
    to_words,
    wait_and_sum,
    wait_for_chunks,
    without_minus_zero,
)
from rapid_infer.ops.providers.triton.launch import start_next, wait_previous


@triton.jit(do_not_specialize=["rank", "max_polls"])
def two_shot_kernel(
    ptrs_ptr, state_ptr, error_ptr, rank, slot, max_polls, x_ptr, out_ptr, size, chunk,
    WORLD: tl.constexpr, PUSH: tl.constexpr, REDUCE: tl.constexpr, COLLECT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK elements of a chunk, for those of every chunk.

    Chunk p is elements `p * chunk ..` of x. A slot holds its sender's part of the receiver's chunk, and behind it the
    sum of the sender's chunk: that one may arrive while the first is still being read.
    """
    start_next(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    addresses = peer_addresses(ptrs_ptr, rank, WORLD)
    wait_previous(PDL)
    epoch, polls = begin_call(state_ptr, max_polls)
    inside = (offset < chunk) & (offset < size - rank * chunk)
    own = to_words(tl.load(x_ptr + rank * chunk + offset, mask=inside, other=0.0))
    if PUSH:
        for step in tl.static_range(1, WORLD):
            peer = (rank + step) % WORLD
            theirs = (offset < chunk) & (offset < size - peer * chunk)
            words = to_words(tl.load(x_ptr + peer * chunk + offset, mask=theirs, other=0.0))
            slots = slots_at(addresses[step], epoch, slot, words, WORLD)
            tl.store(slot_of(slots, rank, slot) + offset, words, mask=theirs, cache_modifier=".wt")
    dtype = x_ptr.dtype.element_ty
    mine = slots_at(addresses[0], epoch, slot, own, WORLD)
    if REDUCE:
        tl.debug_barrier()
        total = wait_and_sum(mine, own, rank, slot, offset, inside, state_ptr, error_ptr, polls, dtype, WORLD)
        clear(mine, rank, slot, offset, inside, WORLD)
        result = without_minus_zero(total.to(dtype))
        push(addresses, epoch, rank, slot, chunk + offset, to_words(result), inside, WORLD)
        tl.store(out_ptr + rank * chunk + offset, result, mask=inside)
    if COLLECT:
        tl.debug_barrier()
        wait_for_chunks(mine, rank, slot, offset, chunk, size, state_ptr, error_ptr, polls, WORLD)
        for peer in tl.static_range(WORLD):
            theirs = (offset < chunk) & (offset < size - peer * chunk) & (rank != peer)
            at = slot_of(mine, peer, slot) + chunk + offset
            words = tl.load(at, mask=theirs, other=1, volatile=True)
            result = without_minus_zero(words.to(dtype, bitcast=True))
            tl.store(out_ptr + peer * chunk + offset, result, mask=theirs)
            tl.store(at, tl.zeros(offset.shape, words.dtype), mask=theirs)
        end_call(state_ptr)
