"""What decode and prefill share inside a kernel: addressing paged keys, and the online softmax over tiles of them.

Scores are kept in units of log2, so that one exp2 makes a weight.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.facts import INTERPRETED
from rapid_infer.ops.providers.triton.kv_values import cached_values, pair_values, split_pairs

TILE_BYTES = 16384
"""Of one tile of keys: with pipelined keys and values, two programs still fit a multiprocessor's shared memory."""
MAX_TILE = 64
"""Keys; a whole page, so that a tile needs one entry of the block table."""
LOG2E = math.log2(math.e)

# The interpreter multiplies the bit patterns of bf16.
_UPCAST = tl.constexpr(INTERPRETED)
_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(math.log(2))


def tile_constants(q: Tensor, k_cache: Tensor) -> dict[str, int]:
    """Constants of both kernels that follow from the shapes of q `[tokens, heads, head_dim]` and the cache."""
    _, block_size, kv_heads, dim = k_cache.shape
    # Products take 16 features or more; of pairs of e4m3, even and odd ones are multiplied apart.
    padded = max(triton.next_power_of_2(dim), 32 if k_cache.element_size() == 1 else 16)
    # By q, since keys of a smaller type become as large in registers.
    tile = min(max(TILE_BYTES // (padded * q.element_size()), 16), MAX_TILE)
    return {
        "GROUP": q.shape[1] // kv_heads,
        "DIM": dim,
        "DIM_PAD": padded,
        "TILE": tile,
        "BLOCK_SIZE": block_size,
    }


def score_scales(scale: float, soft_cap: float | None) -> dict[str, Any]:
    """Kernel arguments that turn a product of q and k into a score in units of log2."""
    if soft_cap is None:
        return {"scale": scale * LOG2E, "cap": 0.0, "CAP": False}
    return {"scale": 2 * LOG2E * scale / soft_cap, "cap": soft_cap * LOG2E, "CAP": True}


@triton.jit
def matmul(a, b, acc):
    if _UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_blocks(table_ptr, first, keys, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block of the keys from `first` on, a multiple of TILE, or, where a tile is not within one, their `[TILE]`."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + first // BLOCK_SIZE, mask=first < keys, other=0)
    else:
        key = first + tl.arange(0, TILE)
        return tl.load(table_ptr + key // BLOCK_SIZE, mask=key < keys, other=0)


@triton.jit
def attend(
    acc, top, total, q, position, k_ptr, v_ptr, table_ptr, begin, end, keys, block_stride, token_stride,
    window, scale, cap,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Take the keys `begin .. end` of a row that has `keys` into (acc `[M, DIM_PAD]`, top `[M]`, total `[M]`).

    q `[M, DIM_PAD]` stands at `position` `[M]`; `begin` is a multiple of TILE. Without MASKED every q sees all of them.
    Pointers to int16 are to pairs of e4m3, and strides count those; `scale` may be `[M, 1]`.
    """
    PAIRS: tl.constexpr = k_ptr.dtype.element_ty == tl.int16
    WIDTH: tl.constexpr = DIM // 2 if PAIRS else DIM
    WIDTH_PAD: tl.constexpr = DIM_PAD // 2 if PAIRS else DIM_PAD
    NONE: tl.constexpr = 0 if PAIRS else 0.0
    dim = tl.arange(0, WIDTH_PAD)
    if PAIRS:
        q_even, q_odd = split_pairs(q)
        even, odd = split_pairs(acc)
    # One tile ahead and by hand: Triton would take a load that others depend on for a stage of its own, and with that
    # stage keep fewer keys and values under way.
    blocks = load_blocks(table_ptr, begin, keys, TILE, BLOCK_SIZE)
    for first in range(begin, end, TILE):
        key = first + tl.arange(0, TILE)
        slot = (first % BLOCK_SIZE + tl.arange(0, TILE)) if BLOCK_SIZE % TILE == 0 else key % BLOCK_SIZE
        at = (blocks.to(tl.int64) * block_stride + slot * token_stride)[:, None] + dim[None, :]
        blocks = load_blocks(table_ptr, first + TILE, keys, TILE, BLOCK_SIZE)
        if MASKED:
            # Slots past the last key may hold NaN, which a weight of zero does not hide.
            inside = (key < keys)[:, None] & (dim < WIDTH)[None, :]
            k = tl.load(k_ptr + at, mask=inside, other=NONE)
            v = tl.load(v_ptr + at, mask=inside, other=NONE)
        elif WIDTH < WIDTH_PAD:
            k = tl.load(k_ptr + at, mask=(dim < WIDTH)[None, :], other=NONE)
            v = tl.load(v_ptr + at, mask=(dim < WIDTH)[None, :], other=NONE)
        else:
            k = tl.load(k_ptr + at)
            v = tl.load(v_ptr + at)
        score = tl.zeros([q.shape[0], TILE], tl.float32)
        if PAIRS:
            k_even, k_odd = pair_values(tl.trans(k))
            score = matmul(q_odd, k_odd, matmul(q_even, k_even, score)) * scale
        else:
            k = cached_values(k, q.dtype)
            v = cached_values(v, q.dtype)
            score = matmul(q, tl.trans(k), score) * scale
        if CAP:
            score = cap - 2.0 * cap / (tl.exp2(score) + 1.0)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = higher
        if MASKED:
            # A q that has seen no key yet: minus infinity less itself would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        if PAIRS:
            v_even, v_odd = pair_values(v)
            weight = weight.to(tl.float16)
            even = matmul(weight, v_even, even * shrink[:, None])
            odd = matmul(weight, v_odd, odd * shrink[:, None])
        else:
            acc = matmul(weight.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    if PAIRS:
        acc = tl.reshape(tl.join(even, odd), [q.shape[0], DIM_PAD])
    return acc, top, total


@triton.jit
def add_parts(
    acc, top, total, partial_ptr, stats_ptr, place, exists, group, GROUP: tl.constexpr, DIM_PAD: tl.constexpr
):
    """Take into (acc `[M, DIM_PAD]`, top `[M]`, total `[M]`) the results that lie at those of `place` `[N]` that exist.

    Their query heads are `group` `[M]`; at each place there are GROUP, in `stats` two lines of them.
    """
    dim = tl.arange(0, DIM_PAD)
    exists = exists[:, None] & (group < GROUP)[None, :]
    # Programs that may have run beside this one wrote these: not to be read through the first level cache.
    stats = stats_ptr + place[:, None] * (2 * GROUP) + group[None, :]
    tops = tl.load(stats, mask=exists, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(stats + GROUP, mask=exists, other=0.0, cache_modifier=".cg")
    at = place[:, None] * GROUP + group[None, :]
    parts = tl.load(
        partial_ptr + at[:, :, None] * DIM_PAD + dim[None, None, :],
        mask=exists[:, :, None], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    higher = tl.maximum(top, tl.max(tops, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(tops - base[None, :])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(totals * weight, 0)
    acc = acc * shrink[:, None] + tl.sum(parts * weight[:, :, None], 0)
    return acc, higher, total


@triton.jit
def finish(acc, top, total, sinks_ptr, head, exists, SINKS: tl.constexpr):
    """(`[M, DIM_PAD]` attention, `[M]` natural log of the denominator) of `[M]` query heads; zeros without keys."""
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=exists, other=0.0).to(tl.float32) * _LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
        top = higher
    total = tl.where(total > 0.0, total, 1.0)
    return acc / total[:, None], (top + tl.log2(total)) * _LN2


@triton.jit
def write_row(
    acc, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, group,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """The result of a row, or of `row` `[M]`, for the `group` `[M]` of query heads of a kv head; none from GROUP on."""
    exists = group < GROUP
    query_head = head * GROUP + group
    out, lse = finish(acc, top, total, sinks_ptr, query_head, exists, SINKS)
    dim = tl.arange(0, DIM_PAD)
    at = tl.cast(row, tl.int64) * (KV_HEADS * GROUP) + query_head
    mask = exists[:, None] & (dim < DIM)[None, :]
    tl.store(out_ptr + at[:, None] * DIM + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        tl.store(lse_ptr + at, lse, mask=exists)


@triton.jit
def store_part(
    acc, top, total, partial_ptr, stats_ptr, place, group, exists, GROUP: tl.constexpr, DIM_PAD: tl.constexpr
):
    """Leave (acc `[M, DIM_PAD]`, top and total `[M]`) at `place`, or `[M]` of them, to be put together with others."""
    dim = tl.arange(0, DIM_PAD)
    at = place * GROUP + group
    tl.store(partial_ptr + at[:, None] * DIM_PAD + dim[None, :], acc, mask=exists[:, None])
    stats = stats_ptr + place * (2 * GROUP) + group
    tl.store(stats, top, mask=exists)
    tl.store(stats + GROUP, total, mask=exists)


@triton.jit
def last_to_arrive(arrived, count):
    """Whether this program is the last of `count` to leave its part; then the counter is zero again."""
    # All threads' results before the one that counts, which publishes them.
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def load_part(partial_ptr, stats_ptr, place, group, exists, GROUP: tl.constexpr, DIM_PAD: tl.constexpr):
    """What `store_part` left; nothing, with a highest score of minus infinity, where not `exists`."""
    dim = tl.arange(0, DIM_PAD)
    # Programs that may have run beside this one wrote it: not to be read through the first level cache.
    at = (place * GROUP + group)[:, None] * DIM_PAD + dim[None, :]
    acc = tl.load(partial_ptr + at, mask=exists[:, None], other=0.0, cache_modifier=".cg")
    stats = stats_ptr + place * (2 * GROUP) + group
    top = tl.load(stats, mask=exists, other=float("-inf"), cache_modifier=".cg")
    return acc, top, tl.load(stats + GROUP, mask=exists, other=0.0, cache_modifier=".cg")


@triton.jit
def merge(acc, top, total, other_acc, other_top, other_total):
    """Both as one: each `[M, DIM_PAD]`, `[M]` and `[M]`."""
    higher = tl.maximum(top, other_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, weight = tl.exp2(top - base), tl.exp2(other_top - base)
    return acc * shrink[:, None] + other_acc * weight[:, None], higher, total * shrink + other_total * weight
