"""Between what caches store (`ops/reference/kv_cache.py`) and what kernels compute with: no code where both are one."""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.facts import INTERPRETED
from rapid_infer.ops.providers.triton.quantized.decode import fp8_codes

_INTERPRETED = tl.constexpr(INTERPRETED)
# Both lower bytes of two pairs, then both upper ones.
_PAIRS = tl.constexpr(
    "{.reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}"
)


@triton.jit
def cached_values(tile, DTYPE: tl.constexpr):
    """A tile of a cache as DTYPE, of e4m3 without its scale; NaN stays NaN."""
    if tile.dtype == DTYPE:
        return tile
    elif tile.dtype == tl.float8e4nv and _INTERPRETED:
        # The interpreter knows no NaN of this type.
        nan = (tile.to(tl.uint8, bitcast=True) & 127) == 127
        return tl.where(nan, float("nan"), tile.to(tl.float32))
    else:
        return tile.to(DTYPE)


@triton.jit
def pair_values(pairs):
    """(fp16 of the lower bytes, of the upper ones) of pairs of e4m3, int16.

    Two at a time, so that copies into registers move elements of 16 bits, for which alone there are fast ones.
    """
    if _INTERPRETED:
        low, high = (pairs & 255).to(tl.uint8), ((pairs >> 8) & 255).to(tl.uint8)
        even = cached_values(low.to(tl.float8e4nv, bitcast=True), tl.float16)
        return even, cached_values(high.to(tl.float8e4nv, bitcast=True), tl.float16)
    else:
        return tl.inline_asm_elementwise(
            _PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip


@triton.jit
def split_pairs(x):
    """(even columns, odd columns) of x `[M, DIM]`, each `[M, DIM / 2]`."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def queries_for_fp8(q, scale):
    """(q `[M, DIM]`, scale of its scores, `[M, 1]` or as it was) for a product with e4m3.

    That becomes fp16 in one instruction for two values, and bf16 in four. So q does too, over a power of two that
    keeps each row in range; beside it all that is lost lies 2^24 below a row's largest value.
    """
    if q.dtype == tl.bfloat16:
        largest = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), 1e-30)
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        power = exponent.to(tl.float32, bitcast=True)
        return (q.to(tl.float32) * inverse[:, None]).to(tl.float16), scale * power[:, None]
    else:
        return q, scale


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
