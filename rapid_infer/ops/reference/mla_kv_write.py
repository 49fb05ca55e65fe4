"""Multi-head latent attention's write: norm the latent, rotate the shared key and the queries' rope part, cache."""

from __future__ import annotations

from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.reference.kv_cache import store_latents, write_slots
from rapid_infer.ops.reference.rms_norm import _normalize
from rapid_infer.ops.reference.rope_kv_write import rotate
from rapid_infer.ops.registry import op


@op(info=("rank", "rope_dim", "kv_cache_dtype"), mutates=("cache", "query"))
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
    """Write `[RMSNorm(latent) | rotated key]` to each token's slot, and each head's rotated rope part to `query`.

    q          `[tokens, heads, nope + rope]`; its last `rope` features are rotated, the others not looked at
    kv         `[tokens, rank + rope]`: the latent, then the key that all heads share. q and kv may have gaps between
               rows
    positions  `[tokens]` int64
    cos_sin    `[positions, rope]` fp32, cosines in the first half
    metadata   its `slots` say where each token goes
    cache      `[blocks, block_size, rank + rope]`, or uint8 with entries as `kv_cache.py` stores them, written in place
    weight     `[rank]` of the norm
    query      `[tokens, heads, rank + rope]`, contiguous; its last `rope` features are written in place

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """
    rank, rope = weight.shape[0], cos_sin.shape[-1]
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    latent, key = kv.split((rank, rope), dim=-1)
    turned = rotate(key.unsqueeze(1), cos, sin, interleaved).squeeze(1)
    write_slots(cache, metadata.slots, store_latents(_normalize(latent, weight, eps), turned, cache.dtype))
    query[..., rank:] = rotate(q[..., -rope:], cos, sin, interleaved)
