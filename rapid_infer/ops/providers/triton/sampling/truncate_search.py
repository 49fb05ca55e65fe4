"""Where a row is cut: the place of the last logit that stays, by the maxima of its groups and one program per row.

A place is an int64: the key of a number, an int32 in the order of the numbers, and below it the id, reversed. No two
are equal, and the token that stays longer has the higher one. A mass is the sum of exp(x - top). All sums are made in
an order that depends on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The key above that of minus infinity, which is never kept nor counted.
LEAST = tl.constexpr(-0x7F800000)
# Halvings of the numbers in a search, of a distance that is mostly REACH.
BY_NUMBER = tl.constexpr(14)
REACH = tl.constexpr(16.0)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def key_of(x):
    """int32 in the order of the numbers; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _place_of(x, ids):
    return (key_of(x).to(tl.int64) << 32) + (0x7FFFFFFF - ids)


@triton.jit
def end_of(key):
    """Behind all places with this key: kept is what has it, too."""
    return key.to(tl.int64) << 32


@triton.jit
def _middle(lo, hi):
    """Without overflow."""
    return (lo >> 1) + (hi >> 1) + (lo & hi & 1)


@triton.jit
def _split(lo, hi, top, step):
    """A key between lo and hi, by which a search takes few steps: most that matters is within REACH of the best.

    Halfway between the numbers at first; between the keys, of which there are many near zero, so that it ends.
    """
    near = key_of(top - REACH)
    middle = key_of(0.5 * _number_of(lo) + 0.5 * _number_of(hi))
    middle = tl.where((lo < near) & (near < hi), near, middle)
    return tl.where((step < BY_NUMBER) & (lo < middle) & (middle < hi), middle, _middle(lo, hi))


@triton.jit
def _split_places(lo, hi, top, step):
    place = end_of(_split((lo >> 32).to(tl.int32), (hi >> 32).to(tl.int32), top, step))
    return tl.where((lo < place) & (place < hi), place, _middle(lo, hi))


@triton.jit
def _bound(
    keys, weights, lo, hi, top, enough, enough_weight, most, BY_WEIGHT: tl.constexpr, FEW: tl.constexpr
):  # fmt: skip
    """A key with enough groups from it on, in number or in weight, or `most` of them; else lo. hi has none.

    An eighth more than that is let in, and so is what can be ranked anyway.
    """
    inside = keys >= lo
    count = tl.sum(inside.to(tl.int32), 0)
    above = tl.full((), 0, tl.int32)
    if BY_WEIGHT:
        possible = (tl.sum(tl.where(inside, weights, 0.0), 0) >= enough_weight) | (count >= most)
    else:
        possible = count >= enough
    step = tl.full((), 0, tl.int32)
    while possible & (hi > lo + 1) & (count > FEW * 3 // 4) & (count - above > count // 8):
        middle = _split(lo, hi, top, step)
        step += 1
        inside = keys >= middle
        here = tl.sum(inside.to(tl.int32), 0)
        if BY_WEIGHT:
            reached = (tl.sum(tl.where(inside, weights, 0.0), 0) >= enough_weight) | (here >= most)
        else:
            reached = here >= enough
        lo = tl.where(reached, middle, lo)
        count = tl.where(reached, here, count)
        hi = tl.where(reached, hi, middle)
        above = tl.where(reached, above, here)
    return lo


@triton.jit
def _gather(
    row_ptr, vocab, keys, lo, top, group_ptr, number_ptr, id_ptr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Numbers and ids of what has key lo or more, as far as there is room. Returns (count, mass) of all of it."""
    hit = (keys >= lo).to(tl.int32)
    tl.store(group_ptr + tl.cumsum(hit, 0) - 1, tl.arange(0, GROUPS), mask=hit > 0)
    groups = tl.sum(hit, 0)
    # What one thread wrote, others read; here and below.
    tl.debug_barrier()
    element = tl.arange(0, STEP * GROUP)
    count = tl.full((), 0, tl.int32)
    masses = tl.zeros((STEP * GROUP,), tl.float32)
    for start in range(0, groups, STEP):
        nth = start + element // GROUP
        group = tl.load(group_ptr + nth, mask=nth < groups, other=0)
        ids = (group // LANES * GROUP + element % GROUP) * LANES + group % LANES
        x = tl.load(row_ptr + ids, mask=(nth < groups) & (ids < vocab), other=NEGATIVE_INFINITY)
        inside = key_of(x) >= lo
        at = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(number_ptr + at, x, mask=inside & (at < ROOM))
        tl.store(id_ptr + at, ids, mask=inside & (at < ROOM))
        count += tl.sum(inside.to(tl.int32), 0)
        masses += tl.where(inside, tl.exp(x - top), 0.0)
    tl.debug_barrier()
    return count, tl.sum(masses, 0)


@triton.jit
def _read(number_ptr, id_ptr, at, size, listed):
    """Numbers, ids and places; unless they are listed, ids are positions."""
    x = tl.load(number_ptr + at, mask=at < size, other=NEGATIVE_INFINITY)
    ids = tl.where(listed, tl.load(id_ptr + at, mask=listed & (at < size), other=0), at)
    return x, ids, _place_of(x, ids)


@triton.jit
def _tally(number_ptr, id_ptr, size, listed, last, top, BLOCK: tl.constexpr):
    """(count, mass) as far as this place, itself included."""
    counts = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        x, _ids, place = _read(number_ptr, id_ptr, start + tl.arange(0, BLOCK), size, listed)
        counts += (place >= last).to(tl.int32)
        masses += tl.where(place >= last, tl.exp(x - top), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _pick(number_ptr, id_ptr, size, listed, lo, hi, to_number_ptr, to_id_ptr, BLOCK: tl.constexpr, FEW: tl.constexpr):
    """Copy what lies from place lo on and below hi. Returns the count."""
    count = tl.full((), 0, tl.int32)
    tl.debug_barrier()
    for start in range(0, size, BLOCK):
        x, ids, place = _read(number_ptr, id_ptr, start + tl.arange(0, BLOCK), size, listed)
        inside = ((place >= lo) & (place < hi)).to(tl.int32)
        at = count + tl.cumsum(inside, 0) - 1
        tl.store(to_number_ptr + at, x, mask=(inside > 0) & (at < FEW))
        tl.store(to_id_ptr + at, ids, mask=(inside > 0) & (at < FEW))
        count += tl.sum(inside, 0)
    tl.debug_barrier()
    return count


@triton.jit
def _rank(number_ptr, id_ptr, size, top, FEW: tl.constexpr, STEP: tl.constexpr):
    """Of each of a few: place, own mass, how many of them come before it, and their mass."""
    x, _ids, place = _read(number_ptr, id_ptr, tl.arange(0, FEW), size, True)
    ranks = tl.zeros((STEP, FEW), tl.int32)
    masses = tl.zeros((STEP, FEW), tl.float32)
    for start in range(0, size, STEP):
        other, _other_ids, other_place = _read(number_ptr, id_ptr, start + tl.arange(0, STEP), size, True)
        ahead = other_place[:, None] > place[None, :]
        ranks += ahead.to(tl.int32)
        masses += tl.where(ahead, tl.exp(other - top)[:, None], 0.0)
    return place, tl.exp(x - top), tl.sum(ranks, 0), tl.sum(masses, 0)


@triton.jit
def last_place(
    row_ptr, vocab, keys, least, top, k, p, total, group_ptr, number_ptr, id_ptr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, AIM: tl.constexpr,
    ROOM: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The place of the last logit that top_k and top_p keep, of those with key `least` or more.

    k is 0 if it takes nothing away, p at least 1. `keys` int32 `[GROUPS]` of the groups' maxima; `total` the mass of
    the row where k is 0 and least is LEAST. There is room for ROOM + FEW numbers and ids.
    """
    beyond = key_of(top) + 1
    if k > 0:
        lo_key = _bound(keys, keys, least, beyond, top, tl.minimum(k, AIM), 0.0, AIM, BY_WEIGHT=False, FEW=FEW)
    else:
        # The masses of maxima promise at least this much. With min_p, no less than all of it tells the total.
        weights = tl.exp(_number_of(keys) - top)
        promised = tl.where(least == LEAST, p * total, float("inf"))
        lo_key = _bound(keys, weights, least, beyond, top, 0, promised, AIM, BY_WEIGHT=True, FEW=FEW)
    held, held_mass = _gather(
        row_ptr, vocab, keys, lo_key, top, group_ptr, number_ptr, id_ptr, GROUPS, GROUP, LANES, STEP, ROOM
    )
    count = held
    found = lo_key == least
    if found:
        total = held_mass
        k = tl.where(k < held, k, 0)
    else:
        found = (k > 0) & (k <= held)
        if not found:
            everything = tl.full((), 0, tl.int32) + vocab
            if (k > 0) | (least > LEAST):
                everything, total = _tally(row_ptr, id_ptr, vocab, False, end_of(least), top, BLOCK)
            k = tl.where(k < everything, k, 0)
            found = (k == 0) & (p < 1.0) & (held_mass >= p * total)
            count = tl.where(found, held, everything)
    # As far as hi there is not enough, as far as lo there is; `count` is that of lo or, to begin with, more.
    lo = end_of(tl.where(found, lo_key, least))
    hi = end_of(tl.where(found, beyond, lo_key))
    above = tl.where(found, 0, held)
    mass_above = tl.where(found, 0.0, held_mass)
    listed = found & (held <= ROOM)
    source = tl.where(listed, number_ptr, row_ptr)
    size = tl.where(listed, held, vocab)
    searching = (k > 0) | (p < 1.0)
    while searching:
        step = tl.full((), 0, tl.int32)
        while (hi > lo + 1) & (count - above > FEW):
            middle = _split_places(lo, hi, top, step)
            step += 1
            here, mass_here = _tally(source, id_ptr, size, listed, middle, top, BLOCK)
            reached = tl.where(k > 0, here >= k, (here > 0) & (mass_here >= p * total))
            lo = tl.where(reached, middle, lo)
            count = tl.where(reached, here, count)
            hi = tl.where(reached, hi, middle)
            above = tl.where(reached, above, here)
            mass_above = tl.where(reached, mass_above, mass_here)
        # The list may be what is to be ranked.
        few = held
        at = tl.full((), 0, tl.int32)
        if not (listed & (held <= FEW)):
            at = tl.full((), ROOM, tl.int32)
            few = _pick(source, id_ptr, size, listed, lo, hi, number_ptr + ROOM, id_ptr + ROOM, BLOCK // 2, FEW)
        place, own, rank, before = _rank(number_ptr + at, id_ptr + at, few, top, FEW, STEP=FEW // 16)
        kept = tl.arange(0, FEW) < few
        whole = hi == end_of(beyond)
        if k > 0:
            kept = kept & (above + rank < k)
            total = mass_above + tl.sum(tl.where(kept, own, 0.0), 0)
        if (p < 1.0) & ((k == 0) | whole):
            kept = kept & ((mass_above + before < p * total) | (above + rank == 0))
        lo = tl.min(tl.where(kept, place, hi), 0)
        # What top_k has left may begin before hi: then top_p has a search of its own.
        searching = (k > 0) & (p < 1.0) & (not whole)
        count = k
        k = tl.full((), 0, tl.int32)
        hi = end_of(beyond)
        above = tl.full((), 0, tl.int32)
        mass_above = tl.full((), 0.0, tl.float32)
    return lo
