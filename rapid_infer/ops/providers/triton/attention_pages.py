"""The online softmax over whole tiles of paged keys that TMA copies: what `attend` does, for long queries on SM 90."""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.attention_tile import matmul
from rapid_infer.ops.providers.triton.facts import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _page(table_ptr, first, keys, BLOCK_SIZE: tl.constexpr):
    """The row of the caches' `[slots, kv_heads * dim]` views where the tile of keys from `first` on begins."""
    at = table_ptr + tl.minimum(first, keys - 1) // BLOCK_SIZE
    if _INTERPRETED:
        block = tl.load(at)
    else:
        # Hidden from Triton, which would copy the number itself ahead and so have no stage left for copying keys.
        block = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    return block * BLOCK_SIZE + first % BLOCK_SIZE


@triton.jit
def _scores(product, first, position, window, scale, cap,
            TILE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Without CAP the scale is left to the exponent, where it costs nothing."""
    score = product
    if CAP:
        score = cap - 2.0 * cap / (tl.exp2(product * scale) + 1.0)
    if MASKED:
        key = first + tl.arange(0, TILE)
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    return score


@triton.jit
def attend_pages(
    acc, top, total, q, position, k_tiles, v_tiles, column, table_ptr, begin, end, keys, window, scale, cap,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAIR: tl.constexpr, MASKED: tl.constexpr, PARTIAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take the keys `begin .. end` of a row that has `keys` into (acc `[M, dim]`, top `[M]`, total `[M]`).

    q `[M, dim]` stands at `position` `[M]`; `begin` is a multiple of TILE, which divides BLOCK_SIZE. `k_tiles` and
    `v_tiles` are descriptors of the caches as `[slots, kv_heads * dim]`, in tiles `[TILE, dim]`. PAIR takes two tiles
    at a time, whose number is even. Without MASKED every q sees all keys; PARTIAL: the last tile may reach past `keys`.
    """
    STEP: tl.constexpr = TILE * 2 if PAIR else TILE
    weigh = 1.0 if CAP else scale
    # One step ahead, so that copies need not wait for the table.
    page = _page(table_ptr, begin, keys, BLOCK_SIZE)
    page_2 = page
    if PAIR:
        page_2 = _page(table_ptr, begin + TILE, keys, BLOCK_SIZE)
    for first in tl.range(begin, end, STEP, num_stages=STAGES):
        k = k_tiles.load([page, column])
        v = v_tiles.load([page, column])
        zeros = tl.zeros([q.shape[0], TILE], tl.float32)
        score = _scores(
            matmul(q, tl.trans(k), zeros), first, position, window, scale, cap, TILE, MASKED, WINDOW, CAP
        )  # fmt: skip
        peak = tl.max(score, 1)
        if PAIR:
            k_2 = k_tiles.load([page_2, column])
            v_2 = v_tiles.load([page_2, column])
            score_2 = _scores(
                matmul(q, tl.trans(k_2), zeros), first + TILE, position, window, scale, cap,
                TILE, MASKED, WINDOW, CAP,
            )  # fmt: skip
            peak = tl.maximum(peak, tl.max(score_2, 1))
            page_2 = _page(table_ptr, first + STEP + TILE, keys, BLOCK_SIZE)
        page = _page(table_ptr, first + STEP, keys, BLOCK_SIZE)
        higher = tl.maximum(top, peak * weigh)
        base = higher
        if MASKED:
            # A q that has seen no key yet: minus infinity less itself would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * weigh - base[:, None])
        shrink = tl.exp2(top - base)
        part = tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        if PARTIAL:
            # Slots past the last key may hold NaN, which a weight of zero does not hide.
            v = tl.where((first + tl.arange(0, TILE) < keys)[:, None], v, 0.0)
        if PAIR:
            weight_2 = tl.exp2(score_2 * weigh - base[:, None])
            part += tl.sum(weight_2, 1)
            acc = matmul(weight.to(v.dtype), v, acc)
            acc = matmul(weight_2.to(v.dtype), v_2, acc)
        else:
            acc = matmul(weight.to(v.dtype), v, acc)
        total = total * shrink + part
        top = higher
    return acc, top, total
