"""What decode and context kernels of MLA share: the online softmax over tiles of cached latents.

A tile is read once and used twice, as keys and as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.cache.spec import LatentRecord
from rapid_infer.ops.providers.triton.attention.tile import load_blocks, matmul, score_scales
from rapid_infer.ops.providers.triton.kv_values import cached_values, pair_values, split_pairs

TILE = 32
"""Keys; of 576 values each, 36 KiB in 16 bits."""
FP32_TILE = 16


@dataclass(frozen=True)
class MLAShape:
    """Constants of both kernels, as they take them, and how the heads are cut: `head_blocks` of `group` heads each."""

    head_blocks: int
    group: int
    constants: dict[str, Any]


def check_strides(q: Tensor, cache: Tensor) -> Tensor:
    """q, with features side by side. ValueError for a cache whose entries have gaps."""
    if cache.stride(-1) != 1:
        raise ValueError(f"a cached entry's features must lie side by side, got strides {cache.stride()}")
    return q if q.stride(-1) == 1 else q.contiguous()


def cache_views(
    cache: Tensor, rank: int, rope: int, latents: torch.dtype = torch.uint8
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(latents, rope keys, scales) of a cache of `LatentRecord`s, each from the first entry's on; else the cache alone.

    Rope keys have 2 bytes, scales 4, and a stride of the cache is one of bytes.
    """
    if cache.dtype != torch.uint8:
        return cache, None, None
    record = LatentRecord(rank, rope)
    of_rope = cache.view(torch.bfloat16)[..., record.rope_at // 2 :]
    return cache.view(latents), of_rope, cache.view(torch.float32)[..., record.scale_at // 4 :]


def read_views(q: Tensor, cache: Tensor, rank: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`cache_views` for queries: latents in pairs, where they are multiplied in 16 bits."""
    paired = q.element_size() == 2 and rank % 2 == 0
    return cache_views(cache, rank, q.shape[-1] - rank, torch.int16 if paired else torch.float8_e4m3fn)


def mla_shape(q: Tensor, cache: Tensor, scale: float, rank: int, most_heads: int) -> MLAShape:
    """For q `[tokens, heads, rank + rope]`, at most `most_heads` in a program."""
    heads, width = q.shape[1:]
    blocks = next(n for n in range(-(-heads // most_heads), heads + 1) if heads % n == 0)
    constants = {
        "scale": score_scales(scale, None)["scale"],
        "RANK": rank,
        # In FP8 even and odd features are multiplied apart, and a product takes 16 or more.
        "RANK_PAD": max(triton.next_power_of_2(rank), 32 if cache.dtype == torch.uint8 else 16),
        "ROPE": width - rank,
        "ROPE_PAD": max(triton.next_power_of_2(width - rank), 16),
        "TILE": FP32_TILE if q.element_size() > 2 else TILE,
        "BLOCK_SIZE": cache.shape[1],
    }
    return MLAShape(blocks, heads // blocks, constants)


@triton.jit
def load_query(
    q_ptr, at, exists, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr
):
    """(`[M, RANK_PAD]`, `[M, ROPE_PAD]`) of the queries that start at `at` `[M]`."""
    index, turned = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    latent = tl.load(
        q_ptr + at[:, None] + index[None, :], mask=exists[:, None] & (index < RANK)[None, :], other=0.0
    )  # fmt: skip
    rope = tl.load(
        q_ptr + at[:, None] + RANK + turned[None, :], mask=exists[:, None] & (turned < ROPE)[None, :], other=0.0
    )  # fmt: skip
    return latent, rope


@triton.jit
def attend_latent(
    acc, top, total, q_latent, q_rope, q_scale, position, cache_ptr, rope_ptr, scales_ptr, table_ptr, begin, end, keys,
    block_stride, token_stride, scale,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys `begin .. end` of a row that has `keys` into (acc `[M, RANK_PAD]`, top `[M]`, total `[M]`).

    Queries stand at `position` `[M]`; `begin` is a multiple of TILE. Without MASKED every query sees all of them.
    `rope_ptr` and `scales_ptr` are of `cache_views`, `q_scale` of
    `queries_for_fp8`, where they are.
    """
    PAIRS: tl.constexpr = cache_ptr.dtype.element_ty == tl.int16
    WIDTH: tl.constexpr = RANK // 2 if PAIRS else RANK
    WIDTH_PAD: tl.constexpr = RANK_PAD // 2 if PAIRS else RANK_PAD
    NONE: tl.constexpr = 0 if PAIRS else 0.0
    index, turned = tl.arange(0, WIDTH_PAD), tl.arange(0, ROPE_PAD)
    if PAIRS:
        q_even, q_odd = split_pairs(q_latent)
        even, odd = split_pairs(acc)
    blocks = load_blocks(table_ptr, begin, keys, TILE, BLOCK_SIZE)
    for first in range(begin, end, TILE):
        key = first + tl.arange(0, TILE)
        slot = (first % BLOCK_SIZE + tl.arange(0, TILE)) if BLOCK_SIZE % TILE == 0 else key % BLOCK_SIZE
        at = (blocks.to(tl.int64) * block_stride + slot * token_stride)[:, None]
        entry = cache_ptr + (at // 2 if PAIRS else at)
        rope_entry = entry + RANK
        if rope_ptr is not None:
            rope_entry = rope_ptr + at // 2
        blocks = load_blocks(table_ptr, first + TILE, keys, TILE, BLOCK_SIZE)
        if MASKED:
            # Slots past the last key may hold NaN, which a weight of zero does not hide.
            inside = (key < keys)[:, None]
            latent = tl.load(entry + index[None, :], mask=inside & (index < WIDTH)[None, :], other=NONE)
            rope = tl.load(rope_entry + turned[None, :], mask=inside & (turned < ROPE)[None, :], other=0.0)
        elif WIDTH < WIDTH_PAD or ROPE < ROPE_PAD:
            latent = tl.load(entry + index[None, :], mask=(index < WIDTH)[None, :], other=NONE)
            rope = tl.load(rope_entry + turned[None, :], mask=(turned < ROPE)[None, :], other=0.0)
        else:
            latent = tl.load(entry + index[None, :])
            rope = tl.load(rope_entry + turned[None, :])
        rope = cached_values(rope, q_rope.dtype)
        score = tl.zeros([q_latent.shape[0], TILE], tl.float32)
        if PAIRS:
            k_even, k_odd = pair_values(tl.trans(latent))
            score = matmul(q_odd, k_odd, matmul(q_even, k_even, score))
        else:
            latent = cached_values(latent, q_latent.dtype)
            score = matmul(q_latent, tl.trans(latent), score)
        if scales_ptr is not None:
            of_keys = tl.load(scales_ptr + tl.reshape(at, [TILE]) // 4, mask=key < keys, other=0.0)[None, :]
            score *= of_keys * q_scale
        score = matmul(q_rope, tl.trans(rope), score) * scale
        if MASKED:
            score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = higher
        if MASKED:
            # A query that has seen no key yet: minus infinity less itself would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        if scales_ptr is not None:
            weight *= of_keys
        if PAIRS:
            v_even, v_odd = pair_values(latent)
            weight = weight.to(tl.float16)
            even = matmul(weight, v_even, even * shrink[:, None])
            odd = matmul(weight, v_odd, odd * shrink[:, None])
        else:
            acc = matmul(weight.to(latent.dtype), latent, acc * shrink[:, None])
        top = higher
    if PAIRS:
        acc = tl.reshape(tl.join(even, odd), [q_latent.shape[0], RANK_PAD])
    return acc, top, total
