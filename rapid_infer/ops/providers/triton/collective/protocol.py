"""How ranks exchange data without a barrier or a flag: a receiver's slot holds +0 bits until data has come.

A rank's workspace is `[2 epochs, ranks, slot]` words of the summed type, all +0 bits between calls. In a call each rank
writes into its slot at all others, +0 as -0, and polls its own workspace until no word there is +0 bits; then it writes
+0 back. The next call uses the other epoch. That a slot may be written again two calls later needs no message: data of
the call between can only come from a peer that has ended the call before it. So all ranks must make the same calls in
the same order on one stream, each call must receive something from every peer, and no call may write to a peer before
the previous call has ended here: with programmatic launch, not before `wait_previous`.

Words are compared as integers: as floats, subnormals may count as zeros, and the wait would not end.
"""

from __future__ import annotations

import triton
import triton.language as tl

CALL = tl.constexpr(1 << 16)
"""What one call adds to a counter, and the most programs that it may have."""


@triton.jit
def begin_call(state_ptr, max_polls):
    """(epoch, looks to wait for). The epoch, 0 or 1, is the same in all programs of a call, since what they add to the
    counter is less than CALL until the last has added. Where a kernel before this has waited in vain, it is one look.
    """
    epoch = (tl.load(state_ptr, volatile=True) >> 16) & 1
    failed = tl.load(state_ptr + 1, volatile=True)
    return epoch, tl.where(failed != 0, 1, max_polls)


@triton.jit
def end_call(state_ptr):
    """Add this program's part of CALL to the counter, once per program, whatever their number."""
    rest = CALL - tl.num_programs(0) + 1
    tl.atomic_add(state_ptr, tl.where(tl.program_id(0) == 0, rest, 1), sem="relaxed")


@triton.jit
def report(late, state_ptr, error_ptr):
    tl.store(state_ptr + 1, late, mask=late != 0)
    tl.store(error_ptr, late, mask=late != 0)


@triton.jit
def peer_addresses(ptrs_ptr, rank, WORLD: tl.constexpr):
    """The workspaces as integers: this rank's, then those of the ranks after it, around."""
    addresses = (tl.load(ptrs_ptr + rank),)
    for step in tl.static_range(1, WORLD):
        addresses = addresses + (tl.load(ptrs_ptr + (rank + step) % WORLD),)  # type: ignore[assignment]  # noqa: RUF005
    return addresses


@triton.jit
def slots_at(address, epoch, slot, like, WORLD: tl.constexpr):
    """Pointer to a workspace's slots of this epoch, to words of the width of `like`'s elements."""
    if like.dtype.primitive_bitwidth == 32:
        base = address.to(tl.pointer_type(tl.int32))
    else:
        base = address.to(tl.pointer_type(tl.int16))
    return tl.multiple_of(base + epoch.to(tl.int64) * WORLD * slot, 16)


@triton.jit
def slot_of(slots, sender, slot):
    # The hint is lost on an address that is only part of another.
    return tl.multiple_of(slots + sender * slot.to(tl.int64), 16)


@triton.jit
def to_words(x):
    """The bits of x, with -0 for +0."""
    if x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
        words = bits | ((bits == 0).to(tl.int32) << 31)
    else:
        bits = x.to(tl.int16, bitcast=True)
        words = bits | ((bits == 0).to(tl.int16) << 15)
    return words


@triton.jit
def to_float32(words, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        wide = (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = words.to(dtype, bitcast=True).to(tl.float32)
    return wide


@triton.jit
def without_minus_zero(x):
    """x with +0 for -0, so that what was sent once more as words is the same as what was not."""
    if x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int16, bitcast=True)
    return tl.where((bits << 1) == 0, 0, bits).to(x.dtype, bitcast=True)


@triton.jit
def push(addresses, epoch, rank, slot, offset, words, inside, WORLD: tl.constexpr):
    """Write words to this rank's slot at all others."""
    for step in tl.static_range(1, WORLD):
        slots = slots_at(addresses[step], epoch, slot, words, WORLD)
        tl.store(slot_of(slots, rank, slot) + offset, words, mask=inside, cache_modifier=".wt")


@triton.jit
def wait_and_sum(
    mine, own, rank, slot, offset, inside, state_ptr, error_ptr, max_polls, dtype: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """The sum over ranks, in their order and fp32, once all have come; `own` are this rank's words.

    Where `inside` is false it is +0. After `max_polls` looks it is whatever is there, and the error word says by bits
    whose data was missing.
    """
    total = to_float32(own, dtype)
    late = 1
    polls = 0
    while (late != 0) & (polls < max_polls):
        total = tl.zeros(own.shape, tl.float32)
        lacking = tl.zeros(own.shape, tl.int32)
        for peer in tl.static_range(WORLD):
            at = slot_of(mine, peer, slot) + offset
            words = tl.load(at, mask=inside & (rank != peer), other=own, volatile=True)
            total += to_float32(words, dtype)
            lacking |= (words == 0).to(tl.int32) << peer
        late = tl.max(lacking, axis=0)
        polls += 1
    report(late, state_ptr, error_ptr)
    return total


@triton.jit
def wait_for_chunks(mine, rank, slot, offset, chunk, size, state_ptr, error_ptr, max_polls, WORLD: tl.constexpr):
    """Return once the sums behind the parts have come: peer p's end where p's chunk of `size` elements does."""
    late = 1
    polls = 0
    while (late != 0) & (polls < max_polls):
        lacking = tl.zeros(offset.shape, tl.int32)
        for peer in tl.static_range(WORLD):
            inside = (offset < chunk) & (offset < size - peer * chunk) & (rank != peer)
            words = tl.load(slot_of(mine, peer, slot) + chunk + offset, mask=inside, other=1, volatile=True)
            lacking |= (words == 0).to(tl.int32) << peer
        late = tl.max(lacking, axis=0)
        polls += 1
    report(late, state_ptr, error_ptr)


@triton.jit
def clear(mine, rank, slot, offset, inside, WORLD: tl.constexpr):
    """Put back the +0 bits."""
    for peer in tl.static_range(WORLD):
        at = slot_of(mine, peer, slot) + offset
        tl.store(at, tl.zeros(offset.shape, mine.dtype.element_ty), mask=inside & (rank != peer))
