"""Stored words of four bytes to 16-bit values in registers; in the interpreter, by arithmetic, in fp32.

All values are exact. Those of e2m1 and e4m3 come from their own bits, moved to where the wider type has exponent and
mantissa, and a power of two that makes up for the difference of the exponents' biases; of codes 0..15 the bits become
the mantissa of 128 + code (1024 + code in fp16), from which 128 + zero is subtracted.

Words `[P, W]` become values `[P, W, 2 (j), 2 (h)]` of the bytes `2 j + h`, packed ones `[P, W, 2 (j), 2, 2 (h)]` with
the low code and then the high one of a byte: the two that differ in j lie in one register.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.facts import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)
_BYTES = (("$W", 0), ("b", 2))
"""Of a word's bytes the first and third, and moved by one the others; in which registers values begin."""


def _asm(body: list[str], pairs: int, inputs: str) -> tuple[str, str]:
    """(instructions, constraints): registers r0, r1, ... take two values each; `inputs`: letters of $W, the word, and
    what else instructions need, always two equal 16-bit numbers.
    """
    text = "shr.b32 b, $W, 8;" + "".join(body)
    for i, name in enumerate(inputs):
        text = text.replace("$" + name, f"${2 * pairs + i}")
    text += "".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, r{i};" for i in range(pairs))
    registers = ", ".join(f"r{i}" for i in range(pairs))
    return "{.reg .b32 a, b, c, m, s, " + registers + ";" + text + "}", ",".join(
        ["=h"] * (2 * pairs) + ["r"] * len(inputs)
    )


def _fp8(kind: str, shift: int, mask: str, unit: str) -> tuple[tuple[str, str], ...]:
    """e4m3 has 4 bits of exponent, bias 7: moved by `shift` bits it is off by `unit`. Without a scale, and with one."""
    end = "and.b32 m, m, " + mask + "; lop3.b32 m, {r}, 0x80008000, m, 0xea; mul." + kind + " r{i}, m, c;"
    body = [f"mov.b32 c, {unit}; shl.b32 a, $W, 8; shr.b32 m, $W, {shift};", end.format(r="$W", i=1)]
    body += [f"shl.b32 m, $W, {8 - shift};", end.format(r="a", i=0)]
    return _asm(body, 2, "W"), _asm(body + [f"mul.{kind} r{i}, r{i}, $S;" for i in (0, 1)], 2, "WS")


def _int4(kind: str, one: str) -> tuple[tuple[str, str], ...]:
    """`one`: the bits of 128 or 1024, twice; $Y and $Z are these plus the zeros."""
    body, scaling = [], []
    for r, i in _BYTES:
        body.append(f"lop3.b32 r{i}, {r}, 0x000f000f, {one}, 0xea; shr.b32 a, {r}, 4;")
        body.append(f"lop3.b32 r{i + 1}, a, 0x000f000f, {one}, 0xea;")
    for i in range(4):
        body.append(f"sub.{kind} r{i}, r{i}, {'$Y' if i % 2 == 0 else '$Z'};")
        scaling.append(f"mul.{kind} r{i}, r{i}, {'$S' if i % 2 == 0 else '$T'};")
    return _asm(body, 4, "WYZ"), _asm(body + scaling, 4, "WYZST")


def _fp4(kind: str, shift: int, mask: str) -> tuple[str, str]:
    """Three bits, moved by `shift` to `mask`, and the sign, from bit 3 of a code to bit 15.

    In bf16 both moves are one product, as nothing of the one lies where the other's bits go.
    """
    body = []
    for r, first in _BYTES:
        # The high code stands four bits further up.
        for i, nibble, up, scale in ((first, "f", 0, "$S"), (first + 1, "f0", 4, "$T")):
            body.append(f"and.b32 a, {r}, 0x{nibble:0>4}{nibble:0>4};")
            if shift == 6:
                factor = (1 << shift - up) + (1 << 12 - up)
                body.append(f"mul.lo.u32 m, a, {factor}; and.b32 r{i}, m, 0x81c081c0;")
            else:
                body.append(f"shl.b32 m, a, {shift - up}; and.b32 m, m, {mask}; shl.b32 s, a, {12 - up};")
                body.append(f"lop3.b32 r{i}, s, 0x80008000, m, 0xea;")
            body.append(f"mul.{kind} r{i}, r{i}, {scale};")
    return _asm(body, 4, "WST")


_BF16 = (*_fp8("bf16x2", 4, "0x07f007f0", "0x7b807b80"), *_int4("bf16x2", "0x43004300"), _fp4("bf16x2", 6, ""))
_FP16 = (*_fp8("f16x2", 1, "0x3f803f80", "0x5c005c00"), *_int4("f16x2", "0x64006400"), _fp4("f16x2", 9, "0x0e000e00"))
# Triton's functions see constants of their own module alone, one by one.
_BF16_FP8, _BF16_FP8_SCALED, _BF16_INT4, _BF16_INT4_SCALED, _BF16_FP4 = (tl.constexpr(x) for x, _ in _BF16)
_FP16_FP8, _FP16_FP8_SCALED, _FP16_INT4, _FP16_INT4_SCALED, _FP16_FP4 = (tl.constexpr(x) for x, _ in _FP16)
_FP8_REGISTERS, _FP8_SCALED_REGISTERS, _INT4_REGISTERS, _INT4_SCALED_REGISTERS, _FP4_REGISTERS = (
    tl.constexpr(x) for _, x in _BF16
)


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
def quotients(values, of):
    """values / of: a product whose error is taken off, since a division of each value takes longer than memory."""
    if _PLAIN:
        return values / of
    else:
        inverse = tl.minimum(1.0 / of, 3e38)
        ratio = values * inverse
        return tl.fma(tl.fma(-ratio, of, values), inverse, ratio)


@triton.jit
def pair(value, DTYPE: tl.constexpr):
    """Twice in a register, for `*_values`; in the interpreter, in fp32."""
    if _PLAIN:
        return value.to(tl.float32)
    else:
        return (value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def fp4_scale(scale, DTYPE: tl.constexpr):
    """`pair` of a stored scale times 2^66 in bf16, 2^5 in fp16; `fp4_factor` is the rest of what `fp4_values` lack."""
    if _PLAIN:
        # 2^-127, which the exponent's bits alone cannot say, becomes 0.
        return (
            (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True) if scale.dtype == tl.uint8 else scale.to(tl.float32)
        )
    elif scale.dtype == tl.uint8:
        return tl.minimum(scale.to(tl.int32) + 66, 254) * 0x00800080
    else:
        return pair(scale.to(tl.float32) * (73786976294838206464.0 if tl.bfloat16 == DTYPE else 32.0), DTYPE)


@triton.jit
def fp4_factor(DTYPE: tl.constexpr):
    if _PLAIN:
        return 1.0
    elif tl.bfloat16 == DTYPE:
        return 1152921504606846976.0
    else:
        return 512.0


@triton.jit
def int4_zero(zero, DTYPE: tl.constexpr):
    """`pair` of 128 + zero, of 1024 + zero in fp16."""
    if _PLAIN:
        return zero.to(tl.float32)
    else:
        return (zero.to(tl.int32) + (0x4300 if tl.bfloat16 == DTYPE else 0x6400)) * 0x10001


@triton.jit
def byte_of(word, i: tl.constexpr):
    return (word >> (8 * i)) & 255


@triton.jit
def four(b0, b1, b2, b3):
    """`[P, W, 2 (j), 2 (h)]` of what the bytes `2 j + h` have."""
    return tl.join(tl.join(b0, b2), tl.join(b1, b3))


@triton.jit
def eight(a0, a1, a2, a3, b0, b1, b2, b3):
    """The same of low and high codes, `[P, W, 2 (j), 2, 2 (h)]`."""
    return tl.join(tl.join(tl.join(a0, a2), tl.join(b0, b2)), tl.join(tl.join(a1, a3), tl.join(b1, b3)))


@triton.jit
def e4m3(code):
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1(code):
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = tl.where(exponent == 0, mantissa * 2, (2 + mantissa) << exponent).to(tl.float32) * 0.25
    return tl.where(code > 7, -size, size)


@triton.jit
def fp8_values(word, scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """e4m3, times `scale` `[P, W]` if SCALED, of which there are pairs, to DTYPE."""
    if _PLAIN:
        values = four(
            e4m3(byte_of(word, 0)), e4m3(byte_of(word, 1)), e4m3(byte_of(word, 2)), e4m3(byte_of(word, 3))
        )  # fmt: skip
        return values * scale[:, :, None, None] if SCALED else values
    else:
        if SCALED:
            b0, b2, b1, b3 = tl.inline_asm_elementwise(
                _BF16_FP8_SCALED if tl.bfloat16 == DTYPE else _FP16_FP8_SCALED, _FP8_SCALED_REGISTERS, [word, scale],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            b0, b2, b1, b3 = tl.inline_asm_elementwise(
                _BF16_FP8 if tl.bfloat16 == DTYPE else _FP16_FP8, _FP8_REGISTERS, [word],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
            )  # fmt: skip
        return four(b0, b1, b2, b3).to(DTYPE, bitcast=True)


@triton.jit
def int4_values(word, zero_low, zero_high, scale_low, scale_high, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """Codes minus zeros, see `int4_zero`, times scales if SCALED; of low and of high codes, `[P, W]`."""
    if _PLAIN:
        c0, c1, c2, c3 = byte_of(word, 0), byte_of(word, 1), byte_of(word, 2), byte_of(word, 3)
        one_low, one_high = (scale_low, scale_high) if SCALED else (1.0, 1.0)
        return eight(
            ((c0 & 15) - zero_low) * one_low, ((c1 & 15) - zero_low) * one_low,
            ((c2 & 15) - zero_low) * one_low, ((c3 & 15) - zero_low) * one_low,
            ((c0 >> 4) - zero_high) * one_high, ((c1 >> 4) - zero_high) * one_high,
            ((c2 >> 4) - zero_high) * one_high, ((c3 >> 4) - zero_high) * one_high,
        )  # fmt: skip
    else:
        if SCALED:
            a0, a2, b0, b2, a1, a3, b1, b3 = tl.inline_asm_elementwise(
                _BF16_INT4_SCALED if tl.bfloat16 == DTYPE else _FP16_INT4_SCALED, _INT4_SCALED_REGISTERS,
                [word, zero_low, zero_high, scale_low, scale_high],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a0, a2, b0, b2, a1, a3, b1, b3 = tl.inline_asm_elementwise(
                _BF16_INT4 if tl.bfloat16 == DTYPE else _FP16_INT4, _INT4_REGISTERS, [word, zero_low, zero_high],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=True, pack=1,
            )  # fmt: skip
        return eight(a0, a1, a2, a3, b0, b1, b2, b3).to(DTYPE, bitcast=True)


@triton.jit
def fp4_values(word, scale_low, scale_high, DTYPE: tl.constexpr):
    """e2m1 times scales, see `fp4_scale`, over `fp4_factor`."""
    if _PLAIN:
        c0, c1, c2, c3 = byte_of(word, 0), byte_of(word, 1), byte_of(word, 2), byte_of(word, 3)
        return eight(
            e2m1(c0 & 15) * scale_low, e2m1(c1 & 15) * scale_low, e2m1(c2 & 15) * scale_low, e2m1(c3 & 15) * scale_low,
            e2m1(c0 >> 4) * scale_high, e2m1(c1 >> 4) * scale_high, e2m1(c2 >> 4) * scale_high,
            e2m1(c3 >> 4) * scale_high,
        )  # fmt: skip
    else:
        a0, a2, b0, b2, a1, a3, b1, b3 = tl.inline_asm_elementwise(
            _BF16_FP4 if tl.bfloat16 == DTYPE else _FP16_FP4, _FP4_REGISTERS, [word, scale_low, scale_high],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=True, pack=1,
        )  # fmt: skip
        return eight(a0, a1, a2, a3, b0, b1, b2, b3).to(DTYPE, bitcast=True)
