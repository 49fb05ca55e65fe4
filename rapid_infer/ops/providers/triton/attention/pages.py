"""The online softmax over whole tiles of paged keys that TMA copies: what `attend` does, for long queries on SM 90."""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.attention.tile import matmul
from rapid_infer.ops.providers.triton.facts import INTERPRETED
from rapid_infer.ops.providers.triton.kv_values import cached_values

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _block(table_ptr, first, keys, BLOCK_SIZE: tl.constexpr):
    """The block with the keys from `first` on."""
    at = table_ptr + tl.minimum(first, keys - 1) // BLOCK_SIZE
    if _INTERPRETED:
        return tl.load(at)
    else:
        # Hidden from Triton, which would copy the number itself ahead and so have no stage left for copying keys.
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def _copy(tiles, block, slot, column, TILE: tl.constexpr, DIM: tl.constexpr):
    """`[TILE, DIM]` of a block from `slot` on; zeros where there is no such slot."""
    return tiles.load([block, slot, column]).reshape(TILE, DIM)


@triton.jit
def _scores(product, key, first, position, window, scale, cap,
            MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Without CAP the scale is left to the exponent, where it costs nothing."""
    score = product
    if CAP:
        score = cap - 2.0 * cap / (tl.exp2(product * scale) + 1.0)
    if MASKED:
        seen = (key[None, :] <= position[:, None]) & (key >= first)[None, :]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    return score


@triton.jit
def attend_pages(
    acc, top, total, q, position, k_tiles, v_tiles, column, table_ptr, begin, end, keys, window, scale, cap,
    DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take the keys `begin .. end` of a row that has `keys` into (acc `[M, DIM]`, top `[M]`, total `[M]`).

    q `[M, DIM]` stands at `position` `[M]`; `begin` is a multiple of TILE, which divides BLOCK_SIZE. `k_tiles` and
    `v_tiles` are descriptors of the caches as `[blocks, BLOCK_SIZE, kv_heads * DIM]`, in tiles `[1, TILE, DIM]`.
    Without MASKED every q sees all keys.
    """
    weigh = 1.0 if CAP else scale
    # One step ahead, so that copies need not wait for the table.
    block = _block(table_ptr, begin, keys, BLOCK_SIZE)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        # Slots past the last key may hold NaN, which a weight of zero does not hide. So a tile that would reach there
        # starts earlier: at keys before its own, which are masked, or before the block, where copies give zeros.
        early = tl.maximum(first + TILE - keys, 0) if MASKED else 0
        slot = first % BLOCK_SIZE - early
        key = first - early + tl.arange(0, TILE)
        k = _copy(k_tiles, block, slot, column, TILE, DIM)
        v = _copy(v_tiles, block, slot, column, TILE, DIM)
        k = cached_values(k, q.dtype)
        v = cached_values(v, q.dtype)
        zeros = tl.zeros([q.shape[0], TILE], tl.float32)
        score = _scores(
            matmul(q, tl.trans(k), zeros), key, first, position, window, scale, cap, MASKED, WINDOW, CAP
        )  # fmt: skip
        block = _block(table_ptr, first + TILE, keys, BLOCK_SIZE)
        higher = tl.maximum(top, tl.max(score, 1) * weigh)
        base = higher
        if MASKED:
            # A q that has seen no key yet: minus infinity less itself would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * weigh - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = matmul(weight.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    return acc, top, total
