"""The plain matrix that a quantized one stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops.quantized import CONSTANT_ZERO, E2M1, QuantizedMatrix, expand, scale_values, unpack_int4
from rapid_infer.ops.registry import op


@op(info=("form",))
def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """`[n, k]` in `dtype`, rounded once from fp32; a stack of experts gives `[experts, n, k]`."""
    scale = expand(scale_values(matrix.scale), matrix.shape, matrix.group)
    if matrix.form == "fp8":
        return (matrix.values.float() * scale).to(dtype)
    codes = unpack_int4(matrix.values, matrix.shape[1])
    if matrix.form == "int4":
        zero = CONSTANT_ZERO if matrix.zero is None else expand(matrix.zero.float(), matrix.shape, matrix.group)
        return ((codes.float() - zero) * scale).to(dtype)
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float32, device=codes.device)
    values = table[codes.int()] * scale
    if matrix.row_scale is not None:
        values *= matrix.row_scale.unsqueeze(-1)
    return values.to(dtype)
