"""4-bit floats (e2m1), two in a byte: NVFP4 with e4m3 scales for 16 inputs, MXFP4 with powers of two for 32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rapid_infer.errors import WeightError
from rapid_infer.ops.quantized import QuantizedMatrix, pack_int4
from rapid_infer.ops.quantizers import MXFP4_GROUP, NVFP4_GROUP, e2m1_codes
from rapid_infer.quant.checks import positive, scales
from rapid_infer.quant.formats.base import (
    DUMMY_DEVIATION,
    Converted,
    Format,
    by_expert,
    check_share,
    dummy_full,
    nibbles,
    refuse_zero_scales,
    spread,
)
from rapid_infer.quant.param_spec import IN, OUT, PART, Dim, Noise, ParamSpec

PAIR = Dim("input", 2, packed=True)
STEPS = 2.5
"""Values to a standard deviation of dummy weights."""
DUMMY_BLOCK_SCALE = 64.0
DUMMY_EXPONENT = 120
SIXTEEN_BIT = "activations stay in 16 bits"


def dummy_codes(noise: Noise, shape: tuple[int, ...]) -> Tensor:
    codes = e2m1_codes(noise((*shape, 2)) * STEPS)
    return codes[..., 0] | codes[..., 1] << 4


def _matrix(
    layout: Any, packed: Tensor, scale: Tensor, dim: Dim, row_scale: Tensor | None, what: str
) -> QuantizedMatrix:
    """packed bytes `[..., out, in / 2]`, scale `[..., out, groups]`."""
    shape = (layout.local_out, layout.ins.local)
    scale, group = spread(layout, (OUT, dim), scale)
    values = by_expert(lambda two: pack_int4(nibbles(two)[..., : shape[1]]), packed)
    matrix = QuantizedMatrix("fp4", values, scale, shape, group, row_scale=row_scale)
    refuse_zero_scales(what, matrix)
    return matrix


@dataclass(frozen=True)
class Nvfp4Format(Format):
    """`codes` uint8 `[out, in / 2]`, `weight_scale` e4m3 `[out, in / 16]`, and `outer` fp32 for each part or row.

    `divides`: the outer scale divides, as in compressed-tensors. `multiplier`: inputs are multiplied by the leaf
    `pre_quant_scale` `[in]` first.
    """

    form: ClassVar[str] = "fp4"
    ignored: ClassVar[Mapping[str, str]] = {"input_scale": SIXTEEN_BIT, "input_global_scale": SIXTEEN_BIT}
    codes: str = "weight"
    outer: str = "weight_scale_2"
    divides: bool = False
    multiplier: bool = False
    outer_dim: Dim = PART

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        outer = DUMMY_DEVIATION / STEPS / DUMMY_BLOCK_SCALE
        dims = (OUT, Dim("input", NVFP4_GROUP))
        specs = {
            self.codes: ParamSpec(torch.uint8, (OUT, PAIR), dummy=dummy_codes),
            "weight_scale": ParamSpec(torch.float8_e4m3fn, dims, scales, dummy_full(DUMMY_BLOCK_SCALE)),
            self.outer: ParamSpec(
                torch.float32, (self.outer_dim,), positive, dummy_full(1 / outer if self.divides else outer)
            ),
        }
        inputs = {"pre_quant_scale": ParamSpec(dtype, (PART, IN), positive, dummy_full(1.0))}
        return specs | (inputs if self.multiplier else {})

    def check(self, layout: Any, what: str) -> None:
        check_share(layout.ins, NVFP4_GROUP, what)

    def convert(self, layout: Any, leaves: Mapping[str, Tensor], what: str) -> Converted:
        outer = leaves[self.outer]
        outer = outer.index_select(-1, layout.entries(self.outer_dim).to(outer.device))
        scale, dim = leaves["weight_scale"], Dim("input", NVFP4_GROUP)
        matrix = _matrix(layout, leaves[self.codes], scale, dim, 1 / outer if self.divides else outer, what)
        multiplier = leaves.get("pre_quant_scale")
        if multiplier is not None:
            if not multiplier.is_meta and (multiplier.ndim > 2 or (multiplier != multiplier[0]).any()):
                raise WeightError(f"{what}: pre_quant_scale differs between its parts, which share one input")
            multiplier = multiplier[0]
        return Converted(matrix, multiplier=multiplier)


@dataclass(frozen=True)
class Mxfp4Format(Format):
    """`codes` bytes `[out, in / 2]` and `scale`, exponents in bytes (e8m0) `[out, in / 32]`.

    `blocked`: codes are `[out, in / 32, 16]`.
    """

    form: ClassVar[str] = "fp4"
    ignored: ClassVar[Mapping[str, str]] = {"input_scale": SIXTEEN_BIT}
    codes: str = "weight_packed"
    scale: str = "weight_scale"
    blocked: bool = False

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        group = Dim("input", MXFP4_GROUP)
        block = (Dim("input", MXFP4_GROUP, packed=True), Dim("value", MXFP4_GROUP // 2))
        return {
            self.codes: ParamSpec(torch.uint8, (OUT, *(block if self.blocked else (PAIR,))), dummy=dummy_codes),
            self.scale: ParamSpec(torch.uint8, (OUT, group), scales, dummy_full(DUMMY_EXPONENT)),
        }

    def check(self, layout: Any, what: str) -> None:
        check_share(layout.ins, MXFP4_GROUP, what)

    def convert(self, layout: Any, leaves: Mapping[str, Tensor], what: str) -> Converted:
        codes = leaves[self.codes].flatten(-2) if self.blocked else leaves[self.codes]
        return Converted(_matrix(layout, codes, leaves[self.scale], Dim("input", MXFP4_GROUP), None, what))
