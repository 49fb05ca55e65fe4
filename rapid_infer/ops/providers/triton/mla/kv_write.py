"""The latent's norm, both rotations and the cache write: per token one program for the entry and some for the heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.kv_values import cached_codes
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.mla.tile import cache_views
from rapid_infer.ops.providers.triton.norm import weigh

HEADS_AT_ONCE = 16
WARPS = 4


@triton.jit
def _kernel(
    q_ptr, kv_ptr, positions_ptr, cos_sin_ptr, slots_ptr, cache_ptr, rope_ptr, scales_ptr, weight_ptr, query_ptr,
    q_stride, q_head_stride, kv_stride, slot_stride, eps, heads,
    NOPE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    in_pair = pair < HALF
    a_at = 2 * pair if INTERLEAVED else pair
    b_at = a_at + 1 if INTERLEAVED else pair + HALF
    wait_previous(PDL)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_sin_ptr + position * 2 * HALF + pair, mask=in_pair, other=1.0)
    sin = tl.load(cos_sin_ptr + position * 2 * HALF + HALF + pair, mask=in_pair, other=0.0)
    if part == 0:
        index = tl.arange(0, RANK_PAD)
        inside = index < RANK
        kv = kv_ptr + token * kv_stride
        at = tl.load(slots_ptr + token) * slot_stride
        entry = cache_ptr + at
        weight = tl.load(weight_ptr + index, mask=inside, other=0.0).to(tl.float32)
        latent = tl.load(kv + index, mask=inside, other=0.0).to(tl.float32)
        key_a = tl.load(kv + RANK + a_at, mask=in_pair, other=0.0).to(tl.float32)
        key_b = tl.load(kv + RANK + b_at, mask=in_pair, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent) / RANK + eps)
        cached = cache_ptr.dtype.element_ty
        if scales_ptr is not None:
            latent = weigh(latent, scale, weight, query_ptr.dtype.element_ty).to(tl.float32)
            latent = tl.where(inside, latent, 0.0)
            largest = tl.max(tl.abs(latent))
            # A maximum may leave NaN out, a sum does not, of which infinity less itself is one.
            of_token = tl.where(largest == 0.0, 1.0, largest * (1.0 / 448.0)) + tl.sum(latent - latent)
            tl.store(scales_ptr + at // 4, of_token)
            tl.store(entry + index, cached_codes(tl.div_rn(latent, of_token), 1.0, cached), mask=inside)
            cached = rope_ptr.dtype.element_ty
            entry = rope_ptr + at // 2
        else:
            tl.store(entry + index, weigh(latent, scale, weight, cached), mask=inside)
            entry += RANK
        tl.store(entry + a_at, (key_a * cos - key_b * sin).to(cached), mask=in_pair)
        tl.store(entry + b_at, (key_b * cos + key_a * sin).to(cached), mask=in_pair)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        real = (head < heads)[:, None] & in_pair[None, :]
        source = q_ptr + token * q_stride + NOPE + head[:, None] * q_head_stride
        to = query_ptr + (token * heads + head[:, None]) * (RANK + 2 * HALF) + RANK
        a = tl.load(source + a_at[None, :], mask=real, other=0.0).to(tl.float32)
        b = tl.load(source + b_at[None, :], mask=real, other=0.0).to(tl.float32)
        dtype = query_ptr.dtype.element_ty
        tl.store(to + a_at[None, :], (a * cos[None, :] - b * sin[None, :]).to(dtype), mask=real)
        tl.store(to + b_at[None, :], (b * cos[None, :] + a * sin[None, :]).to(dtype), mask=real)


def mla_kv_write(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    metadata: AttentionMetadata,
    cache: Tensor,
    weight: Tensor,
    eps: float,
    interleaved: bool,
    query: Tensor,
) -> None:
    """A cache must be contiguous from slot to slot."""
    tokens, heads, width = q.shape
    rank, rope = weight.shape[0], cos_sin.shape[-1]
    if q.stride(-1) != 1 or kv.stride(-1) != 1 or not query.is_contiguous():
        raise ValueError(f"features must lie side by side, got strides {q.stride()}, {kv.stride()}, {query.stride()}")
    cache, of_rope, scales = cache_views(cache, rank, rope)
    if tokens:
        _kernel[(tokens, 1 + triton.cdiv(heads, HEADS_AT_ONCE))](
            q, kv, positions, cos_sin, metadata.slots, cache, of_rope, scales, weight, query,
            q.stride(0), q.stride(1), kv.stride(0), cache.stride(1), eps, heads,
            NOPE=width - rope, RANK=rank, RANK_PAD=triton.next_power_of_2(rank),
            HALF=rope // 2, HALF_PAD=triton.next_power_of_2(rope // 2), INTERLEAVED=interleaved,
            HEADS=HEADS_AT_ONCE, num_warps=WARPS, **options(q),
        )  # fmt: skip
