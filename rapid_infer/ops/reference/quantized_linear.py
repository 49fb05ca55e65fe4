"""The product of activations and a quantized matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.quantized import QuantizedMatrix, expand
from rapid_infer.ops.reference.dequantize import dequantize
from rapid_infer.ops.reference.silu_and_mul import silu_and_mul
from rapid_infer.ops.registry import op

ACTIVATIONS = ("none", "tensor", "token", "group")
FP8_MAX = 448.0
GROUP = 128


def activation_group(activation: str, matrix: QuantizedMatrix) -> int:
    """Inputs of a row that share a scale."""
    return min(matrix.group[1], GROUP) if activation == "group" else matrix.shape[1]


def quantize_activations(x: Tensor, group: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn `[tokens, k]`, scale fp32 `[tokens, ceil(k / group)]`); `scale` `[]` is used for all if given.

    A scale is the largest magnitude over 448, or 1 where all are zero. What is not finite becomes NaN, as does then, of
    a scale made here, the whole group.
    """
    tokens, k = x.shape
    wide = x.float()
    if scale is None:
        blocks = F.pad(wide, (0, -k % group)).unflatten(-1, (-1, group))
        largest = blocks.abs().amax(-1)
        scale = torch.where(largest == 0, 1.0, largest / FP8_MAX)
    else:
        scale = scale.float().expand(tokens, -(-k // group))
    codes = wide / expand(scale, (tokens, k), (1, group))
    codes = torch.where(wide.isfinite() & codes.isfinite(), codes.clamp(-FP8_MAX, FP8_MAX), torch.nan)
    return codes.to(torch.float8_e4m3fn), scale.contiguous()


@op(info=("form",))
def quantized_linear(
    x: Tensor,
    matrix: QuantizedMatrix,
    activation: str,
    input_scale: Tensor | None,
    exact_rows: int,
    out_dtype: torch.dtype | None,
    gated: bool,
) -> Tensor:
    """`x W^T`. x `[tokens, k]`; returns `[tokens, n]` in `out_dtype`, None for that of x.

    activation   of form fp8, what x is rounded to: "none", or e4m3 with a scale per "tensor" (`input_scale` fp32
                 `[]`), per "token", or per "group" of `min(group_k, 128)` inputs of a token
    exact_rows   with at most so many tokens x stays as it is: reading the matrix is what takes time then
    gated        returns `silu_and_mul` of that, `[tokens, n / 2]`; a provider need not round before the activation
    """
    k = matrix.shape[1]
    dtype = out_dtype or x.dtype
    x = x.float()
    if activation != "none" and len(x) > exact_rows:
        group = activation_group(activation, matrix)
        codes, scale = quantize_activations(x, group, input_scale if activation == "tensor" else None)
        x = codes.float() * expand(scale, (len(x), k), (1, group))
    y = F.linear(x, dequantize.reference(matrix, torch.float32)).to(dtype)
    return silu_and_mul.reference(y) if gated else y
