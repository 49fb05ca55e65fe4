"""The first half of a SwiGLU feed-forward layer: both products and the activation."""

from __future__ import annotations

from torch import Tensor

from rapid_infer.ops.reference.linear import linear
from rapid_infer.ops.reference.silu_and_mul import silu_and_mul
from rapid_infer.ops.registry import op


@op()
def linear_silu_and_mul(x: Tensor, weight: Tensor) -> Tensor:
    """`silu_and_mul(linear(x, weight))`. x `[tokens, in]`, weight `[2 * size, in]`, the gate half first; returns
    `[tokens, size]`. A provider need not round the products before the activation.
    """
    return silu_and_mul.reference(linear.reference(x, weight))
