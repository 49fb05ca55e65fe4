"""From the merged QKV projection to a query ready for attention, with keys and values written to their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.reference.kv_cache import head_dim, store_heads, write_slots
from rapid_infer.ops.reference.rms_norm import _normalize
from rapid_infer.ops.registry import op


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `2 * cos.shape[-1]` features of x `[tokens, heads, dim]` in fp32; the rest passes through.

    Pairs are (i, i + half) for the half-split style and (2i, 2i + 1) for the interleaved one.
    """
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@op(info=("head_dim", "rotary_dim", "kv_cache_dtype"), mutates=("k_cache", "v_cache"))
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
    """Per head: RMSNorm of q and k (if weights are given), rotate both, write k and v to their slots, return q.

    qkv        `[tokens, (heads + 2 * kv_heads) * head_dim]`, all of Q, then K, then V
    positions  `[tokens]` int64
    cos_sin    `[positions, rotary_dim]` fp32, cosines in the first half; None: no rotation. rotary_dim may be below
               head_dim
    metadata   its `slots` say where each token's key and value go
    k_cache, v_cache  `[blocks, block_size, kv_heads, head_dim]`, or as `kv_cache.py` stores it, written in place
    kv_scales  `[2 (K, V), kv_heads]` fp32 of caches in e4m3 and NVFP4; None of others
    returns q  `[tokens, heads, head_dim]` in qkv's dtype; kv_heads and head_dim are those of the cache
    """
    kv_heads, dim = k_cache.shape[-2], head_dim(k_cache)
    heads = qkv.shape[-1] // dim - 2 * kv_heads
    q, k, v = qkv.view(len(qkv), -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None:
        q = _normalize(q, q_weight, eps)
    if k_weight is not None:
        k = _normalize(k, k_weight, eps)
    if cos_sin is not None:
        cos, sin = cos_sin[positions].chunk(2, dim=-1)
        q, k = rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales
    write_slots(k_cache, metadata.slots, store_heads(k, k_cache.dtype, k_scale))
    write_slots(v_cache, metadata.slots, store_heads(v, v_cache.dtype, v_scale))
    return q
