"""Cases of products with quantized matrices: every form and group, partial blocks, and both regimes of activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rapid_infer.ops.quantized import QuantizedMatrix
from rapid_infer.ops.quantizers import quantize_fp8, quantize_int4, quantize_mxfp4, quantize_nvfp4
from rapid_infer.testing.op_cases.case import Case, cases
from rapid_infer.testing.op_cases.experts import fused_experts


def matrices(weight: Tensor) -> Iterator[QuantizedMatrix]:
    """Of `[..., n, k]`, k at least 128."""
    n, k = weight.shape[-2:]
    for group in ((n, k), (1, k), (128, 128), (32, 32), (64, 64)):
        yield quantize_fp8(weight, *group)
    yield quantize_int4(weight, 128)
    yield quantize_int4(weight, 64, symmetric=False)
    half = quantize_int4(weight, 32, symmetric=False)
    yield replace(half, scale=half.scale.half())
    yield quantize_int4(weight, k)
    yield quantize_mxfp4(weight)
    yield quantize_nvfp4(weight)


def _weight(n: int, k: int, device: str) -> Tensor:
    """Rows of unlike magnitude."""
    return torch.randn(n, k, device=device) * (0.2 + torch.rand(n, 1, device=device)) / k**0.5


@cases
def dequantize(dtype: torch.dtype, device: str) -> Iterator[Case]:
    stack = list(matrices(_weight(2 * 20, 128, device).view(2, 20, 128)))
    for matrix in (*matrices(_weight(37, 208, device)), *stack[1::3]):
        yield Case({"matrix": matrix, "dtype": dtype}, {"form": matrix.form})


@cases
def quantized_linear(dtype: torch.dtype, device: str) -> Iterator[Case]:
    kinds = {1: "tensor", 2: "token", 3: "group", 4: "group", 5: "group"}
    for i, matrix in enumerate(matrices(_weight(38, 208, device))):
        for tokens, activation in ((1 + 4 * (i % 5), "none"), (3, kinds.get(i)), (70, kinds.get(i - 2))):
            if activation is None or (matrix.form != "fp8" and activation != "none"):
                continue
            kwargs = {
                "x": torch.randn(tokens, 208, device=device).to(dtype),
                "matrix": matrix,
                "activation": activation,
                "input_scale": torch.tensor(4 / 448, device=device) if activation == "tensor" else None,
                "exact_rows": 64 if tokens > 64 else 0,
                "out_dtype": torch.float32 if i % 2 else None,
                "gated": i % 3 == 2,
            }
            yield Case(kwargs, {"form": matrix.form})


@cases
def quantized_experts(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for i, case in enumerate(fused_experts(dtype, device)):
        pair = (matrices(case.kwargs[name].float()) for name in ("gate_up", "down"))
        for gate_up, down in list(zip(*pair))[1 + i :: 5]:
            kwargs = {**case.kwargs, "gate_up": gate_up, "down": down}
            yield Case(kwargs, {**case.extra, "form": gate_up.form})
