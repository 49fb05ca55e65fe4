"""QK-norm, RoPE and KV write straight from the merged projection: a program per some tokens and a group of heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.kv_values import cached_codes
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.norm import weigh

FEW_TOKENS = 64
"""Up to here a program takes few heads, so that one token fills more of the device."""
MANY_TOKENS = 256
"""From here on a program takes several, so that more is under way while it waits for positions and slots."""
AT_ONCE = 2
WARPS_AT_ONCE = 4


@triton.jit
def _column(x, TOKENS: tl.constexpr):
    """One number, or one for every line of a tile."""
    if TOKENS == 1:
        return x
    else:
        return x[:, None]


@triton.jit
def _kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, slots_ptr, q_ptr, k_cache_ptr, v_cache_ptr, q_weight_ptr, k_weight_ptr,
    kv_scales_ptr, qkv_stride, slot_stride, eps, heads, kv_heads, tokens,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROTATE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A head is cut into the two members of each rotated pair, `a` and `b`, and the `rest` that is not rotated."""
    start_next(PDL)
    nth = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + nth
    exists = head < heads + 2 * kv_heads
    if TOKENS > 1:
        token = token * TOKENS + nth // HEADS
        head = tl.program_id(1) * HEADS + nth % HEADS
        exists = (head < heads + 2 * kv_heads) & (token < tokens)
    is_q, is_v = head < heads, head >= heads + kv_heads
    is_k = exists & ~is_q & ~is_v
    pair = tl.arange(0, HALF_PAD)
    in_pair = pair < HALF
    a_at = 2 * pair if INTERLEAVED else pair
    b_at = a_at + 1 if INTERLEAVED else pair + HALF
    wait_previous(PDL)
    if TOKENS == 1:
        position = tl.load(positions_ptr + token)
        slot = tl.load(slots_ptr + token)
    else:
        position = tl.load(positions_ptr + token, mask=token < tokens, other=0)
        slot = tl.load(slots_ptr + token, mask=token < tokens, other=0)
    source = qkv_ptr + _column(token * qkv_stride, TOKENS) + head[:, None] * DIM
    paired = exists[:, None] & in_pair[None, :]
    a = tl.load(source + a_at[None, :], mask=paired, other=0.0).to(tl.float32)
    b = tl.load(source + b_at[None, :], mask=paired, other=0.0).to(tl.float32)
    total = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    if REST_PAD > 0:
        rest_at = 2 * HALF + tl.arange(0, REST_PAD)
        kept = exists[:, None] & (rest_at < DIM)[None, :]
        rest = tl.load(source + rest_at[None, :], mask=kept, other=0.0).to(tl.float32)
        total += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(total / DIM + eps)[:, None]
    dtype = q_ptr.dtype.element_ty
    if Q_NORM:
        a = tl.where(is_q[:, None], weigh(a, scale, tl.load(q_weight_ptr + a_at, mask=in_pair, other=0.0), dtype), a)
        b = tl.where(is_q[:, None], weigh(b, scale, tl.load(q_weight_ptr + b_at, mask=in_pair, other=0.0), dtype), b)
        if REST_PAD > 0:
            weight = tl.load(q_weight_ptr + rest_at, mask=rest_at < DIM, other=0.0)
            rest = tl.where(is_q[:, None], weigh(rest, scale, weight, dtype), rest)
    if K_NORM:
        a = tl.where(is_k[:, None], weigh(a, scale, tl.load(k_weight_ptr + a_at, mask=in_pair, other=0.0), dtype), a)
        b = tl.where(is_k[:, None], weigh(b, scale, tl.load(k_weight_ptr + b_at, mask=in_pair, other=0.0), dtype), b)
        if REST_PAD > 0:
            weight = tl.load(k_weight_ptr + rest_at, mask=rest_at < DIM, other=0.0)
            rest = tl.where(is_k[:, None], weigh(rest, scale, weight, dtype), rest)
    if ROTATE:
        angle = cos_sin_ptr + _column(position * 2 * HALF, TOKENS) + pair[None, :]
        cos = tl.load(angle, mask=in_pair[None, :], other=1.0)
        sin = tl.load(angle + HALF, mask=in_pair[None, :], other=0.0)
        turned = a * cos - b * sin
        b = tl.where(is_v[:, None], b, b * cos + a * sin)
        a = tl.where(is_v[:, None], a, turned)
    q_to = q_ptr + _column(token * heads * DIM, TOKENS) + head[:, None] * DIM
    k_to = k_cache_ptr + _column(slot * slot_stride, TOKENS) + (head - heads)[:, None] * DIM
    v_to = v_cache_ptr + _column(slot * slot_stride, TOKENS) + (head - heads - kv_heads)[:, None] * DIM
    cached = k_cache_ptr.dtype.element_ty
    is_q, is_v = is_q & exists, is_v & exists
    inverse = 1.0
    if kv_scales_ptr is not None:
        # Scales of keys, then of values: as heads of k and v follow each other.
        scale = tl.load(kv_scales_ptr + head - heads, mask=is_k | is_v, other=1.0)
        inverse = tl.div_rn(scale * 0.0 + 1.0, scale)[:, None]
    for_q, for_k, for_v = (
        is_q[:, None] & in_pair[None, :],
        is_k[:, None] & in_pair[None, :],
        is_v[:, None] & in_pair[None, :],
    )
    tl.store(q_to + a_at[None, :], a.to(dtype), mask=for_q)
    tl.store(q_to + b_at[None, :], b.to(dtype), mask=for_q)
    a, b = cached_codes(a, inverse, cached), cached_codes(b, inverse, cached)
    tl.store(k_to + a_at[None, :], a, mask=for_k)
    tl.store(k_to + b_at[None, :], b, mask=for_k)
    tl.store(v_to + a_at[None, :], a, mask=for_v)
    tl.store(v_to + b_at[None, :], b, mask=for_v)
    if REST_PAD > 0:
        in_rest = (rest_at < DIM)[None, :]
        tl.store(q_to + rest_at[None, :], rest.to(dtype), mask=is_q[:, None] & in_rest)
        rest = cached_codes(rest, inverse, cached)
        tl.store(k_to + rest_at[None, :], rest, mask=is_k[:, None] & in_rest)
        tl.store(v_to + rest_at[None, :], rest, mask=is_v[:, None] & in_rest)


def qk_norm_rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    metadata: AttentionMetadata,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    interleaved: bool,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """A cache must be contiguous from slot to slot; heads of both caches lie one after another."""
    kv_heads, dim = k_cache.shape[-2:]
    tokens, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    # Without a rotation the pairs are only a way to cut a head in two.
    half = dim // 2 if cos_sin is None else cos_sin.shape[-1] // 2
    rest = dim - 2 * half
    if kv_scales is not None:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    group = 4 if tokens <= FEW_TOKENS else 8
    at_once, warps = (1, group) if tokens < MANY_TOKENS else (AT_ONCE, WARPS_AT_ONCE)
    if tokens:
        _kernel[(triton.cdiv(tokens, at_once), triton.cdiv(heads + 2 * kv_heads, group))](
            qkv, positions, cos_sin if cos_sin is not None else qkv, metadata.slots, q, k_cache, v_cache,
            q_weight if q_weight is not None else qkv, k_weight if k_weight is not None else qkv,
            kv_scales, qkv.stride(0), k_cache.stride(1), eps, heads, kv_heads, tokens,
            DIM=dim, HALF=half, HALF_PAD=triton.next_power_of_2(max(half, 1)),
            REST_PAD=triton.next_power_of_2(rest) if rest else 0,
            Q_NORM=q_weight is not None, K_NORM=k_weight is not None, INTERLEAVED=interleaved,
            ROTATE=cos_sin is not None, TOKENS=at_once, HEADS=group, num_warps=warps, **options(qkv),
        )  # fmt: skip
    return q
