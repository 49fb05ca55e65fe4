"""Products with a quantized matrix: of few tokens fused, of many by cuBLAS, on FP8 or on a matrix in 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rapid_infer.ops.providers.triton.activation import silu_and_mul
from rapid_infer.ops.providers.triton.facts import INTERPRETED
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options
from rapid_infer.ops.providers.triton.linear.linear import workspace
from rapid_infer.ops.providers.triton.quantized.activations import dequantize_activations, quantize_activations
from rapid_infer.ops.providers.triton.quantized.choice import (
    LINE,
    cannot_multiply,
    choose,
    codes_of,
    inner_group,
    is_inner,
    most_lines,
)
from rapid_infer.ops.providers.triton.quantized.config import Config, padded_rows
from rapid_infer.ops.providers.triton.quantized.dequantize import constants_of, dequantize, tensors_of
from rapid_infer.ops.providers.triton.quantized.kernels import product_kernel
from rapid_infer.ops.providers.triton.quantized.scaled_mm import ROWS_ALIGNED, scaled_kind, scaled_product
from rapid_infer.ops.quantized import QuantizedMatrix
from rapid_infer.ops.reference.quantized_linear import activation_group


def quantized_linear(
    x: Tensor,
    matrix: QuantizedMatrix,
    activation: str,
    input_scale: Tensor | None,
    exact_rows: int,
    out_dtype: torch.dtype | None,
    gated: bool,
) -> Tensor:
    dtype = out_dtype or x.dtype
    if gated and (activation == "none" or len(x) <= exact_rows):
        config = chosen(x, matrix, gated)
        if config is not None:
            return product(x, matrix, config, dtype, gated)
    if gated:
        return silu_and_mul(quantized_linear(x, matrix, activation, input_scale, exact_rows, out_dtype, False))
    if activation != "none" and len(x) > exact_rows:
        return _rounded_product(x, matrix, activation, input_scale, dtype)
    config = chosen(x, matrix)
    if config is not None:
        return product(x, matrix, config, dtype)
    return plain_product(x, dequantize(matrix, x.dtype), dtype)


def _rounded_product(
    x: Tensor, matrix: QuantizedMatrix, activation: str, input_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    tokens, group = len(x), activation_group(activation, matrix)
    kind = None if x.dtype is torch.float32 else scaled_kind(matrix, group, x.device)
    rows = tokens if kind is None else triton.cdiv(tokens, ROWS_ALIGNED) * ROWS_ALIGNED
    given = input_scale if activation == "tensor" else None
    codes, scale = quantize_activations(x, group, given, rows, by_group=kind == "block")
    if kind is None:
        return plain_product(dequantize_activations(codes, scale, group, x.dtype), dequantize(matrix, x.dtype), dtype)
    return scaled_product(kind, codes, scale, matrix, dtype)[:tokens]


def plain_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`x weight^T` in `dtype`, not rounded before."""
    if dtype is x.dtype:
        return F.linear(x, weight)
    if x.device.type == "cuda" and dtype is torch.float32:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x.float(), weight.float()).to(dtype)


def chosen(x: Tensor, matrix: QuantizedMatrix, gated: bool = False) -> Config | None:
    """None: the kernel cannot take these, or would be slower than others."""
    if x.dim() != 2 or x.stride(1) != 1 or cannot_multiply(matrix, x.dtype, INTERPRETED):
        return None
    (n, k), group, sms = matrix.shape, inner_group(matrix), num_multiprocessors(x.device)
    return choose(matrix.form, n // (1 + gated), k, x.shape[0], group, sms, gated)


def product(x: Tensor, matrix: QuantizedMatrix, config: Config, dtype: torch.dtype, gated: bool = False) -> Tensor:
    """x `[m, k]`, matrix `[n, k]` -> `[m, n]`; gated: matrix `[2 n, k]` -> `silu(first half) * second half`."""
    (m, k), n = x.shape, matrix.shape[0] // (1 + gated)
    group = inner_group(matrix)
    inner = config.inner or is_inner(matrix.form, group)
    if not config.fits(m, n, gated) or (config.lines > most_lines(matrix.form, group) and not inner):
        raise ValueError(f"{config} cannot compute {m} x {n} outputs of {matrix.form} in groups of {group}")
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    words, scale, zero, row_scale = tensors_of(matrix)
    width, rows = words.shape[-1], padded_rows(m)
    iters = triton.cdiv(triton.cdiv(width, 16 * config.lines), config.splits)
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(m, rows), config.splits)
    product_kernel[grid](
        x, words, scale, zero, row_scale, out, *workspace(x.device),
        m, n, k, width, scale.shape[-1], x.stride(0), iters,
        **constants_of(matrix),
        INNER=inner,
        ROWS=rows,
        BLOCK_N=config.block_n,
        LINES=config.lines,
        WARPS=config.warps,
        SPLITS=config.splits,
        STAGES=config.stages,
        GATED=gated,
        GATHER=config.gather,
        EVEN=iters * config.splits * config.lines * LINE * codes_of(matrix.form) == k,
        AHEAD=config.ahead if width >= 32 else 0,
        ONCE=iters == 1,
        WIDE=INTERPRETED,
        num_warps=config.warps,
        **options(x),
    )  # fmt: skip
    return out
