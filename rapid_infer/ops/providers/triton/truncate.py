"""min_p, top_k and top_p without a sort: one program per row finds the last logit that stays, and which of its equals.

The row is read three times. First for its maximum, and the maximum of each of BLOCK interleaved stripes: the k-th best
stripe is a lower bound of the k-th best logit, and close to it. Then what lies above that bound is gathered, a few
thousand candidates, among which the search goes on. Last the row is written. Only where a flat row needs more than
that does the search read all of it again in each step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

BLOCK = 8192
"""Elements per step, stripes, and candidates that have room."""

AIM = 4096
"""Candidates that are looked for when top_k does not say how many; about 5700 have half of the stripes as their own."""

# Keys of fp32 numbers: above those of minus infinity, which is never kept nor counted; and no position.
LEAST = tl.constexpr(0x00800000)
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _key(x):
    """uint32 in the order of the numbers; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits < 0x80000000, bits | 0x80000000, bits ^ 0xFFFFFFFF)


@triton.jit
def _number(key):
    return tl.where(key < 0x80000000, key ^ 0xFFFFFFFF, key ^ 0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _load(source, at, size):
    return tl.load(source + at, mask=at < size, other=float("-inf"))


@triton.jit
def _search(source, size, lo, hi, count, mass, top, enough, enough_mass, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key that, with what is above it, still has enough: in number, or in mass.

    At the start that holds for lo, which has this count and mass, and not for hi, which has none. Returns (key, count
    and mass from it on, count and mass above it). The key may be lower than the number it stands for when that one is
    alone.
    """
    lane = tl.arange(0, BLOCK)
    above = tl.full((), 0, tl.int32)
    mass_above = tl.full((), 0.0, tl.float32)
    while (hi - lo > 1) & (count - above > 1):
        middle = lo + ((hi - lo) >> 1)
        counts = tl.zeros((BLOCK,), tl.int32)
        masses = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, size, BLOCK):
            x = _load(source, start + lane, size)
            inside = _key(x) >= middle
            counts += inside.to(tl.int32)
            masses += tl.where(inside, tl.exp(x - top), 0.0)
        here = tl.sum(counts, 0)
        mass_here = tl.sum(masses, 0)
        if BY_MASS:
            reached = mass_here >= enough_mass
        else:
            reached = here >= enough
        lo = tl.where(reached, middle, lo)
        count = tl.where(reached, here, count)
        mass = tl.where(reached, mass_here, mass)
        hi = tl.where(reached, hi, middle)
        above = tl.where(reached, above, here)
        mass_above = tl.where(reached, mass_above, mass_here)
    return lo, count, mass, above, mass_above


@triton.jit
def _nth(source, size, key, n, BLOCK: tl.constexpr):
    """Where the n-th element with this key stands, counted from 1."""
    lane = tl.arange(0, BLOCK)
    seen = tl.full((), 0, tl.int32)
    found = tl.full((), NOWHERE, tl.int32)
    for start in range(0, size, BLOCK):
        equal = (_key(_load(source, start + lane, size)) == key).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        found = tl.minimum(found, tl.min(tl.where((equal > 0) & (rank == n), start + lane, NOWHERE), 0))
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def _bound(stripes, lo, hi, aim, BLOCK: tl.constexpr):
    """A key with at least `aim` stripes from it on, and not many more; else lo."""
    count = tl.full((), BLOCK, tl.int32)
    while (hi - lo > 1) & (count > aim + aim // 8):
        middle = lo + ((hi - lo) >> 1)
        here = tl.sum((stripes >= middle).to(tl.int32), 0)
        reached = here >= aim
        lo = tl.where(reached, middle, lo)
        count = tl.where(reached, here, count)
        hi = tl.where(reached, hi, middle)
    return lo


@triton.jit
def _gather(row_ptr, size, least, lo, top, number_ptr, id_ptr, BLOCK: tl.constexpr):
    """Numbers and ids from key lo on, in order, as far as there is room. Returns (population and its mass, from key
    `least` on, count and mass from lo on).
    """
    lane = tl.arange(0, BLOCK)
    held = tl.full((), 0, tl.int32)
    counts = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    held_masses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        ids = start + lane
        x = _load(row_ptr, ids, size)
        key = _key(x)
        inside = key >= lo
        mass = tl.where(key >= least, tl.exp(x - top), 0.0)
        counts += (key >= least).to(tl.int32)
        masses += mass
        held_masses += tl.where(inside, mass, 0.0)
        at = held + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(number_ptr + at, x, mask=inside & (at < BLOCK))
        tl.store(id_ptr + at, ids, mask=inside & (at < BLOCK))
        held += tl.sum(inside.to(tl.int32), 0)
    # Up to the next multiple of 16, so that loads of these are vectors.
    rest = held + tl.arange(0, 16)
    tl.store(number_ptr + rest, float("-inf"), mask=rest < BLOCK)
    # What one thread wrote, others read.
    tl.debug_barrier()
    return tl.sum(counts, 0), tl.sum(masses, 0), held, tl.sum(held_masses, 0)


@triton.jit
def _last(row_ptr, vocab, least, stripes, top, k, p, number_ptr, id_ptr, AIM: tl.constexpr, BLOCK: tl.constexpr):
    """(key, id) of the last logit that top_k and top_p keep, in the order of decreasing logits."""
    beyond = _key(top) + 1
    lo = _bound(stripes, least, beyond, tl.where(k > 0, tl.minimum(k, AIM), AIM), BLOCK)
    population, total, held, held_mass = _gather(row_ptr, vocab, least, lo, top, number_ptr, id_ptr, BLOCK)
    by_k = (k > 0) & (k < population)
    complete = (lo == least) | tl.where(by_k, k <= AIM, held_mass >= p * total)
    small = complete & (held <= BLOCK)
    source = tl.where(small, number_ptr, row_ptr)
    size = tl.where(small, tl.cdiv(held, 16) * 16, vocab)
    lo = tl.where(small, lo, least)
    count = tl.where(small, held, population)
    mass = tl.where(small, held_mass, total)
    where = tl.full((), NOWHERE, tl.int32)
    if by_k:
        lo, count, mass, above, mass_above = _search(
            source, size, lo, beyond, count, mass, top, k, 0.0, BY_MASS=False, BLOCK=BLOCK
        )
        if count > k:
            where = _nth(source, size, lo, k - above, BLOCK)
            mass = mass_above + (k - above).to(tl.float32) * tl.exp(_number(lo) - top)
            count = k
        total = mass
    if p < 1.0:
        after_k = lo
        lo, count, mass, above, mass_above = _search(
            source, size, lo, beyond, count, mass, top, 0, p * total, BY_MASS=True, BLOCK=BLOCK
        )
        if lo > after_k:
            where = tl.full((), NOWHERE, tl.int32)
        missing = (p * total - mass_above) / tl.maximum(tl.exp(_number(lo) - top), 1e-30)
        n = tl.maximum(tl.ceil(tl.minimum(missing, 1e9)).to(tl.int32), 1)
        if n < count - above:
            where = _nth(source, size, lo, n, BLOCK)
    if small & (where != NOWHERE):
        where = tl.load(id_ptr + where)
    return lo, where


@triton.jit
def _kernel(
    logits_ptr, top_k_ptr, top_p_ptr, min_p_ptr, number_ptr, id_ptr,
    stride, top_k_stride, top_p_stride, min_p_stride, vocab,
    AIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * stride
    wait_previous(PDL)
    k = tl.full((), 0, tl.int32)
    p = tl.full((), 1.0, tl.float32)
    min_p = tl.full((), 0.0, tl.float32)
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + row * top_k_stride).to(tl.int32)
        p = tl.load(top_p_ptr + row * top_p_stride)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + row * min_p_stride)
    by_rank = ((k > 0) & (k < vocab)) | (p < 1.0)
    if by_rank | (min_p > 0.0):
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            best = tl.maximum(best, _load(row_ptr, start + lane, vocab), propagate_nan=tl.PropagateNan.ALL)
        top = tl.max(best, 0)
        broken = (tl.max((best != best).to(tl.int32), 0) > 0) | (top == float("inf")) | (top == float("-inf"))
        if not broken:
            floor = top + tl.log(tl.where(min_p > 0.0, min_p, 1.0))
            key = tl.maximum(tl.where(min_p > 0.0, _key(floor), LEAST), LEAST)
            last = tl.full((), NOWHERE, tl.int32)
            if by_rank:
                key, last = _last(
                    row_ptr, vocab, key, _key(best), top, k, p, number_ptr + row * BLOCK, id_ptr + row * BLOCK,
                    AIM=AIM, BLOCK=BLOCK,
                )  # fmt: skip
            for start in range(0, vocab, BLOCK):
                ids = start + lane
                this = _key(_load(row_ptr, ids, vocab))
                kept = (this > key) | ((this == key) & (ids <= last))
                tl.store(row_ptr + ids, float("-inf"), mask=(ids < vocab) & ~kept)


def truncate_logits(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """In place, unless the rows of `logits` are strided within."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    if top_k is None or top_p is None:
        top_k = top_p = None
    rows, vocab = logits.shape
    if rows:
        block = min(max(triton.next_power_of_2(vocab), 16), BLOCK)
        numbers = torch.empty(rows, block, device=logits.device)
        ids = torch.empty(rows, block, dtype=torch.int32, device=logits.device)
        strides = (0 if setting is None else setting.stride(0) for setting in (top_k, top_p, min_p))
        _kernel[(rows,)](
            logits, top_k, top_p, min_p, numbers, ids, logits.stride(0), *strides, vocab,
            AIM=min(AIM, block), BLOCK=block, num_warps=16 if block >= 4096 else 4, **options(logits),
        )  # fmt: skip
    return logits
