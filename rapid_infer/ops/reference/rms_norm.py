"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops.registry import op


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded before the weight is applied, as the published models were trained: the order shows in bf16.
    return weight * wide.to(x.dtype)


@op()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32.

    x `[..., size]`, weight `[size]`; returns `[..., size]` in x's dtype. Source: Zhang and Sennrich 2019.
    """
    return _normalize(x, weight, eps)


@op()
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual = residual + x; x = rms_norm(residual)`.

    x, residual `[tokens, size]`, weight `[size]`; returns (normed, residual), both in x's dtype. A provider may reuse
    both buffers.
    """
    residual = x + residual
    return _normalize(residual, weight, eps), residual
