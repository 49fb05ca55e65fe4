"""The first half of a SwiGLU feed-forward layer: both products and the activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops.linear import linear
from rapid_infer.ops.registry import Case, op
from rapid_infer.ops.silu_and_mul import silu_and_mul


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, inputs, size in ((1, 64, 96), (5, 48, 33), (40, 128, 64)):
        x = torch.randn(rows, inputs, device=device).to(dtype)
        yield Case({"x": x, "weight": (torch.randn(2 * size, inputs, device=device) / inputs**0.5).to(dtype)})


@op(inputs=_inputs)
def linear_silu_and_mul(x: Tensor, weight: Tensor) -> Tensor:
    """`silu_and_mul(linear(x, weight))`. x `[tokens, in]`, weight `[2 * size, in]`, the gate half first; returns
    `[tokens, size]`. A provider need not round the products before the activation.
    """
    return silu_and_mul.reference(linear.reference(x, weight))
