"""Stored bytes to 16-bit values in registers, four bytes at a time; in the interpreter, by arithmetic, in fp32.

All values are exact. Those of e2m1 and e4m3 come from their own bits, moved to where the wider type has exponent and
mantissa, and a power of two that makes up for the difference of the exponents' biases; of codes 0..15 the bits become
the mantissa of 128 + code (1024 + code in fp16), from which 128 + zero is subtracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.facts import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)


def _fp8() -> str:
    """e4m3 has 4 bits of exponent, bias 7: moved by 4 bits it is off by 2^120 in bf16."""
    end = "and.b32 m, m, 0x07f007f0; lop3.b32 m, {r}, 0x80008000, m, 0xea; mul.bf16x2 {out}, m, c;"
    return (
        "{.reg .b32 a, m, c; mov.b32 c, 0x7b807b80; shl.b32 a, $2, 8; shl.b32 m, $2, 4;" + end.format(r="a", out="$0")
        + "shr.b32 m, $2, 4;" + end.format(r="$2", out="$1") + "}"
    )  # fmt: skip


_PAIRS = (("$4", "$0", "$2"), ("b", "$1", "$3"))
"""Of four bytes the first and third, and moved by a byte the others; where their low and high codes go."""


def _int4(one: str) -> str:
    """`one`: the bits of 128 or 1024, twice."""
    low, high = "lop3.b32 {out}, {r}, 0x000f000f, " + one + ", 0xea;", "shr.b32 a, {r}, 4;"
    body = "".join(low.format(r=r, out=x) + high.format(r=r) + low.format(r="a", out=y) for r, x, y in _PAIRS)
    return "{.reg .b32 a, b; shr.b32 b, $4, 8;" + body + "}"


def _fp4(shift: int, mask: str) -> str:
    """Three bits, moved by `shift` to `mask`, and the sign, from bit 3 of a code to bit 15.

    In bf16 both moves are one product, as nothing of the one lies where the other's bits go.
    """
    lines = []
    for r, *outs in _PAIRS:
        # The high code stands four bits further up.
        for out, nibble, up in zip(outs, ("f", "f0"), (0, 4)):
            lines.append(f"and.b32 a, {r}, 0x{nibble:0>4}{nibble:0>4};")
            if shift == 6:
                factor, both = (1 << shift - up) + (1 << 12 - up), "0x81c081c0"
                lines.append(f"mul.lo.u32 m, a, {factor}; and.b32 {out}, m, {both};")
            else:
                lines.append(f"shl.b32 m, a, {shift - up}; and.b32 m, m, {mask}; shl.b32 s, a, {12 - up};")
                lines.append(f"lop3.b32 {out}, s, 0x80008000, m, 0xea;")
    return "{.reg .b32 a, b, m, s; shr.b32 b, $4, 8;" + "".join(lines) + "}"


_FP8 = tl.constexpr(_fp8())
_INT4_BF16, _INT4_FP16 = tl.constexpr(_int4("0x43004300")), tl.constexpr(_int4("0x64006400"))
_FP4_BF16, _FP4_FP16 = tl.constexpr(_fp4(6, "0x01c001c0")), tl.constexpr(_fp4(9, "0x0e000e00"))


@triton.jit
def _swapped(tile):
    """`[..., 4 n]`: of each four the second and third change places, as the instructions leave them."""
    P: tl.constexpr = tile.shape[0]
    B: tl.constexpr = tile.shape[1]
    return tl.reshape(tl.permute(tl.reshape(tile, [P, B // 4, 2, 2]), (0, 1, 3, 2)), [P, B])


@triton.jit
def fp8_values(tile, DTYPE: tl.constexpr):
    """Bytes of e4m3 `[P, B]` to DTYPE, of each four the second and third exchanged."""
    if tl.bfloat16 == DTYPE and not _PLAIN:
        return tl.inline_asm_elementwise(_FP8, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return _swapped(tile.to(tl.float8e4nv, bitcast=True).to(tl.float32 if _PLAIN else DTYPE))


@triton.jit
def fp8_codes(values):
    """The nearest e4m3 of fp32 values from -448 to 448, as bytes."""
    if _PLAIN:
        # The interpreter's own conversion is wrong where rounding carries into the exponent.
        size = tl.abs(values)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        subnormal = ((size * 512 + 8388608.0) - 8388608.0).to(tl.int32)
        code = tl.where(size < 0.015625, subnormal, normal)
        return tl.where(values < 0, code | 128, code).to(tl.uint8)
    else:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _pairwise(OP: tl.constexpr, a, b, DTYPE: tl.constexpr):
    """`a OP b`, two values an instruction, which the compiler alone does not see."""
    if _PLAIN:
        if OP == "sub":
            return a - b.to(tl.float32)
        else:
            return a * b.to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            OP + ".bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            OP + ".f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def _of_groups(OP: tl.constexpr, values, groups, DTYPE: tl.constexpr):
    """`values OP groups`: values `[P, B]`, groups `[P, C]`, each for B / C values."""
    P: tl.constexpr = values.shape[0]
    B: tl.constexpr = values.shape[1]
    C: tl.constexpr = groups.shape[1]
    of_each = tl.broadcast_to(groups[:, :, None], [P, C, B // C])
    return tl.reshape(_pairwise(OP, tl.reshape(values, [P, C, B // C]), of_each, DTYPE), [P, B])


@triton.jit
def int4_values(tile, zero_low, zero_high, DTYPE: tl.constexpr):
    """Low and high codes of bytes `[P, B]` minus their zeros `[P, C]`, fp32; order as `fp8_values`."""
    if _PLAIN:
        low, high = int4_codes(tile)
        offset = 0.0
    elif tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            _INT4_BF16, "=r,=r,=r,=r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        offset = 128.0
    else:
        low, high = tl.inline_asm_elementwise(
            _INT4_FP16, "=r,=r,=r,=r,r", [tile], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        offset = 1024.0
    low = _of_groups("sub", low, (zero_low + offset).to(DTYPE), DTYPE)
    return low, _of_groups("sub", high, (zero_high + offset).to(DTYPE), DTYPE)


@triton.jit
def scaled(values, scale, DTYPE: tl.constexpr):
    """values `[P, B]` times scale `[P, C]`, rounded to DTYPE, of which both are."""
    return _of_groups("mul", values, scale, DTYPE)


@triton.jit
def inner_scale(scale, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Scales as they are stored, for `scaled`: those of e2m1 times 2^66 in bf16, 2^5 in fp16, see `fp4_values`."""
    if scale.dtype == tl.uint8:
        # 2^-127, which the exponent's bits alone cannot say, becomes 0.
        if _PLAIN:
            return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        else:
            exponent = tl.minimum(scale.to(tl.int32) + 66, 254)
            return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif FORM != "fp4" or _PLAIN:
        return scale.to(DTYPE if not _PLAIN else tl.float32)
    elif scale.dtype == tl.float8e4nv:
        return scale.to(tl.float32).to(DTYPE) * (73786976294838206464.0 if tl.bfloat16 == DTYPE else 32.0)
    else:
        return (scale.to(tl.float32) * (73786976294838206464.0 if tl.bfloat16 == DTYPE else 32.0)).to(DTYPE)


@triton.jit
def fp4_values(tile, DTYPE: tl.constexpr):
    """Low and high e2m1 values, over 2^126 in bf16, 2^14 in fp16, by which the types' biases differ; order as
    `fp8_values`.

    Times a scale that may not fit: `inner_scale` brings a part of it, `fp4_factor` the rest.
    """
    if _PLAIN:
        return _swapped(_fp4_plain(tile & 15)), _swapped(_fp4_plain(tile >> 4))
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _FP4_BF16, "=r,=r,=r,=r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _FP4_FP16, "=r,=r,=r,=r,r", [tile], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )


@triton.jit
def _fp4_plain(code):
    code = code.to(tl.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = tl.where(exponent == 0, mantissa * 2, (2 + mantissa) << exponent).to(tl.float32) / 4
    return tl.where(code > 7, -size, size)


@triton.jit
def fp4_factor(DTYPE: tl.constexpr):
    """What products of e2m1 are to be multiplied by in the end."""
    if _PLAIN:
        return 1.0
    elif tl.bfloat16 == DTYPE:
        return 1152921504606846976.0
    else:
        return 512.0


@triton.jit
def fp4_unit(DTYPE: tl.constexpr):
    """What `fp4_values` are to be multiplied by, alone."""
    if _PLAIN:
        return 1.0
    elif tl.bfloat16 == DTYPE:
        return 85070591730234615865843651857942052864.0
    else:
        return 16384.0


@triton.jit
def int4_codes(tile):
    """Low and high codes of bytes `[P, B]` in fp32, order as `fp8_values`."""
    return _swapped((tile & 15).to(tl.float32)), _swapped((tile >> 4).to(tl.float32))


@triton.jit
def in_order(low, high):
    """What stands so, `[P, B]` of each, to columns as files have them, `[P, 2 B]`."""
    P: tl.constexpr = low.shape[0]
    B: tl.constexpr = low.shape[1]
    quarters = tl.reshape(tl.join(low, high), [P, B // 16, 16, 2])
    return tl.reshape(tl.permute(quarters, (0, 1, 3, 2)), [P, 2 * B])
