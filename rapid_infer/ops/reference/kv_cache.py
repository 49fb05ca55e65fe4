"""What caches store of keys, values and latents: one function each that makes it and that reads it.

    type of the cache   of a head's key or value                      scales
    of a float          the value, rounded                            none
    e4m3                value / scale, at most 448                    fp32 of the layer's head: `kv_scales`
    uint8 (NVFP4)       e2m1 codes, then e4m3 scales of 16 features   the same, over those

A latent in bytes is a `LatentRecord`, with a scale that is its own: its largest magnitude becomes 448. What is not
finite is stored as NaN, which neither type would do by itself, and so reaches the row's result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rapid_infer.cache.spec import NVFP4_GROUP, LatentRecord
from rapid_infer.ops.quantized import E2M1
from rapid_infer.ops.quantizers import FP8_MAX, e2m1_codes


def head_dim(cache: Tensor) -> int:
    """Features of a head's key in cache `[..., width]`."""
    width = cache.shape[-1]
    # Of 16 features 8 bytes are codes and one their scale.
    return width * NVFP4_GROUP // (NVFP4_GROUP // 2 + 1) if cache.dtype == torch.uint8 else width


def _fp8(x: Tensor, scaled: Tensor) -> Tensor:
    return scaled.clamp(-FP8_MAX, FP8_MAX).where(x.isfinite(), math.nan).to(torch.float8_e4m3fn)


def store_heads(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """x `[..., kv_heads, head_dim]`, scale `[kv_heads]` fp32 -> `[..., kv_heads, width]` as a cache of `dtype` has."""
    if scale is None:
        return x.to(dtype)
    scaled = x.float() * scale.reciprocal().unsqueeze(-1)
    if dtype == torch.float8_e4m3fn:
        return _fp8(x, scaled)
    groups = scaled.unflatten(-1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1)
    # The smallest step that a scale has; a group below it is stored as zeros.
    scales = _fp8(largest, (largest / E2M1[-1]).clamp(min=2**-9))
    codes = e2m1_codes((groups / scales.float().unsqueeze(-1)).flatten(-2))
    return torch.cat((codes[..., ::2] | codes[..., 1::2] << 4, scales.view(torch.uint8)), dim=-1)


def load_heads(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values `[..., kv_heads, head_dim]` that `store_heads` stored, in `dtype`."""
    if scale is None:
        return stored.to(dtype)
    if stored.dtype != torch.uint8:
        return (stored.float() * scale.unsqueeze(-1)).to(dtype)
    half = head_dim(stored) // 2
    codes, scales = stored[..., :half], stored[..., half:].contiguous().view(torch.float8_e4m3fn)
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=stored.device)
    values = table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()].unflatten(-1, (-1, NVFP4_GROUP))
    return (values * (scales.float() * scale.unsqueeze(-1)).unsqueeze(-1)).flatten(-2).to(dtype)


def write_slots(cache: Tensor, slots: Tensor, stored: Tensor) -> None:
    """stored `[tokens, ...]` to the slots `[tokens]` of cache `[blocks, block_size, ...]`."""
    flat = cache.flatten(0, 1)
    if cache.dtype == torch.float8_e4m3fn:
        # What moves elements knows bytes everywhere.
        flat, stored = flat.view(torch.uint8), stored.view(torch.uint8)
    flat[slots] = stored


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """`[*slots.shape, ...]` of cache `[blocks, block_size, ...]`, as stored."""
    flat = cache.flatten(0, 1)
    return flat.view(torch.uint8)[slots].view(cache.dtype) if cache.dtype == torch.float8_e4m3fn else flat[slots]


def store_latents(latent: Tensor, rope: Tensor, dtype: torch.dtype) -> Tensor:
    """latent `[tokens, rank]`, rope `[tokens, rope]` -> entries `[tokens, width]` of a cache of `dtype`."""
    if dtype != torch.uint8:
        return torch.cat((latent, rope), dim=-1).to(dtype)
    record = LatentRecord(latent.shape[-1], rope.shape[-1])
    largest = latent.float().abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest * (1 / FP8_MAX))
    entry = torch.zeros(len(latent), record.width, dtype=torch.uint8, device=latent.device)
    entry[:, : record.rank] = _fp8(latent, latent.float() / scale).view(torch.uint8)
    entry[:, record.rope_at : record.rope_at + 2 * record.rope_dim] = rope.bfloat16().contiguous().view(torch.uint8)
    entry[:, record.scale_at : record.scale_at + 4] = scale.view(torch.uint8)
    return entry


def load_latents(entries: Tensor, rank: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """`[..., rank + rope_dim]` in `dtype` of entries `[..., width]`."""
    if entries.dtype != torch.uint8:
        return entries.to(dtype)
    record = LatentRecord(rank, rope_dim)
    scale = entries.view(torch.float32)[..., record.scale_at // 4, None]
    latent = entries.view(torch.float8_e4m3fn)[..., :rank].float() * scale
    rope = entries.view(torch.bfloat16)[..., record.rope_at // 2 : record.rope_at // 2 + rope_dim]
    return torch.cat((latent.to(dtype), rope.to(dtype)), dim=-1)
