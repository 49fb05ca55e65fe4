"""FP8 files: e4m3 values with a scale for the matrix, each row, each block, or each group of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rapid_infer.ops.quantized import QuantizedMatrix, scale_values
from rapid_infer.quant.checks import positive, scales
from rapid_infer.quant.formats.base import (
    DUMMY_FP8_SCALE,
    WHOLE,
    Converted,
    Format,
    dummy_fp8,
    dummy_full,
    refuse_zero_scales,
    spread,
)
from rapid_infer.quant.param_spec import OUT, PART, Dim, ParamSpec

DUMMY_INPUT_SCALE = 0.01
TENSOR: tuple[Dim, ...] = (PART,)
ROWS: tuple[Dim, ...] = (OUT, WHOLE)


def blocks(rows: int, columns: int) -> tuple[Dim, ...]:
    return (Dim("output", rows), Dim("input", columns))


@dataclass(frozen=True)
class Fp8Format(Format):
    """`weight` e4m3 `[out, in]`, `scale` over `dims`, and where activations have static scales `input_scale` `[]`.

    `dynamic`: what activations are rounded to without those. `exponents`: scales are bytes (e8m0).
    """

    form: ClassVar[str] = "fp8"
    dims: tuple[Dim, ...]
    scale: str = "weight_scale"
    input_scale: str | None = None
    dynamic: str = "token"
    exponents: bool = False

    @property
    def activation(self) -> str:
        return self.dynamic if self.input_scale is None else "tensor"

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        scale = ParamSpec(torch.float32, self.dims, scales, dummy_full(DUMMY_FP8_SCALE))
        if self.exponents:
            scale = ParamSpec(torch.uint8, self.dims, scales, dummy_full(115))
        specs = {"weight": ParamSpec(torch.float8_e4m3fn, dummy=dummy_fp8), self.scale: scale}
        if self.input_scale is not None:
            specs[self.input_scale] = ParamSpec(torch.float32, TENSOR, positive, dummy_full(DUMMY_INPUT_SCALE))
        return specs

    def convert(self, layout: Any, leaves: Mapping[str, Tensor], what: str) -> Converted:
        scale, group = spread(layout, self.dims, scale_values(leaves[self.scale]))
        shape = (layout.local_out, layout.ins.local)
        matrix = QuantizedMatrix("fp8", leaves["weight"], scale, shape, group)
        refuse_zero_scales(what, matrix)
        if self.input_scale is None:
            return Converted(matrix)
        # Parts share their input, and so its codes.
        return Converted(matrix, input_scale=leaves[self.input_scale].amax())
