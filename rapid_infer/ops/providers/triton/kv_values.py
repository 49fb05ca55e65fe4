"""Between what caches store (`ops/reference/kv_cache.py`) and what kernels compute with: no code where both are one."""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.quantized.decode import fp8_codes, fp8_values


@triton.jit
def cached_values(tile, DTYPE: tl.constexpr):
    """A tile of a cache as DTYPE, of e4m3 without its scale."""
    if tile.dtype == DTYPE:
        return tile
    elif tile.dtype == tl.float8e4nv:
        return fp8_values(tile, DTYPE)
    else:
        return tile.to(DTYPE)


@triton.jit
def cached_codes(x, inverse, CACHED: tl.constexpr):
    """fp32 x as a cache of CACHED stores it, e4m3 as bytes, after a product with `inverse`, of the shape of x."""
    if tl.uint8 == CACHED:
        scaled = tl.clamp(x * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        # Infinity less itself is no number, nor is NaN less itself.
        return tl.where(x - x == 0.0, fp8_codes(scaled), 0x7F)
    else:
        return x.to(CACHED)


@triton.jit
def head_scales(scales_ptr, head, KV_HEADS: tl.constexpr):
    """(of keys, of values) of a kv head: `scales_ptr` is fp32 `[2, KV_HEADS]`."""
    return tl.load(scales_ptr + head), tl.load(scales_ptr + KV_HEADS + head)
