"""Products with a quantized matrix: of few tokens fused, of many by cuBLAS, on FP8 or on a matrix in 16 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rapid_infer.ops.providers.triton.facts import INTERPRETED
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options
from rapid_infer.ops.providers.triton.linear.config import padded_rows
from rapid_infer.ops.providers.triton.linear.linear import workspace
from rapid_infer.ops.providers.triton.quantized.activations import dequantize_activations, quantize_activations
from rapid_infer.ops.providers.triton.quantized.choice import (
    Config,
    block_limit,
    cannot_multiply,
    choose,
    inner_group,
    is_inner,
)
from rapid_infer.ops.providers.triton.quantized.dequantize import constants_of, dequantize, tensors_of
from rapid_infer.ops.providers.triton.quantized.gemv import gemv_kernel
from rapid_infer.ops.providers.triton.quantized.kernels import product_kernel
from rapid_infer.ops.providers.triton.quantized.scaled_mm import ROWS_ALIGNED, scaled_kind, scaled_product
from rapid_infer.ops.quantized import HALF, QuantizedMatrix
from rapid_infer.ops.reference.quantized_linear import activation_group


def quantized_linear(
    x: Tensor,
    matrix: QuantizedMatrix,
    activation: str,
    input_scale: Tensor | None,
    exact_rows: int,
    out_dtype: torch.dtype | None,
) -> Tensor:
    dtype = out_dtype or x.dtype
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


def chosen(x: Tensor, matrix: QuantizedMatrix) -> Config | None:
    """None: the kernel cannot take these, or would be slower than cuBLAS."""
    if x.dim() != 2 or x.stride(1) != 1 or cannot_multiply(matrix, x.dtype, INTERPRETED):
        return None
    n, k = matrix.shape
    return choose(matrix.form, n, k, x.shape[0], inner_group(matrix), num_multiprocessors(x.device))


def product(x: Tensor, matrix: QuantizedMatrix, config: Config, dtype: torch.dtype) -> Tensor:
    """x `[m, k]` of at most 64 rows; `[m, n]`."""
    (m, k), n, width = x.shape, matrix.shape[0], matrix.values.shape[-1]
    group = inner_group(matrix)
    if config.gemv:
        limit = triton.next_power_of_2(k) if m == 1 and matrix.form == "fp8" else 0
    else:
        limit = block_limit(matrix.form, group)
    if not config.fits(m, n) or config.block > limit:
        raise ValueError(f"{config} cannot compute {m} x {n} outputs of {matrix.form} in groups of {group}")
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    _, scale, zero, row_scale = tensors_of(matrix)
    iters = triton.cdiv(triton.cdiv(width, config.block), config.splits)
    columns = iters * config.splits * config.block * (1 if matrix.form == "fp8" else 2)
    sizes = m, n, k, width, scale.shape[-1], x.stride(0), iters
    shared = {
        "BLOCK_N": config.block_n,
        "SPLITS": config.splits,
        "STAGES": config.stages,
        "EVEN": columns == k,
        "num_warps": config.warps,
        **options(x),
    }
    grid = (triton.cdiv(n, config.block_n), config.splits)
    if config.gemv:
        gemv_kernel[grid](
            x, matrix.values, scale, out, *workspace(x.device), *sizes,
            GROUP_N=matrix.group[0], GROUP=group, CHUNKS=config.block // 16, LOOP=iters > 1, **shared,
        )  # fmt: skip
    else:
        inner = is_inner(matrix.form, group)
        product_kernel[grid](
            x, matrix.values, scale, zero, row_scale, out, *workspace(x.device), *sizes,
            **constants_of(matrix),
            INNER=inner,
            ROWS=padded_rows(m),
            BLOCK=config.block,
            COUNT=config.block // group if inner and 0 < group < HALF else 1,
            WEIGHT_FIRST=config.weight_first,
            LINES=config.ahead if width >= 128 else 0,
            WIDE=INTERPRETED,
            **shared,
        )  # fmt: skip
    return out
