"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops.registry import Case, op


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded before the weight is applied, as the published models were trained: the order shows in bf16.
    return weight * wide.to(x.dtype)


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, size in ((1, 64), (5, 576), (33, 80)):
        x, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, size), (size,)))
        yield Case({"x": x, "weight": weight, "eps": 1e-6})


def _add_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for case in _inputs(dtype, device):
        residual = torch.randn_like(case.kwargs["x"])
        yield Case({"x": case.kwargs["x"], "residual": residual, "weight": case.kwargs["weight"], "eps": 1e-6})


@op(inputs=_inputs)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32.

    x `[..., size]`, weight `[size]`; returns `[..., size]` in x's dtype. Source: Zhang and Sennrich 2019.
    """
    return _normalize(x, weight, eps)


@op(inputs=_add_inputs)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual = residual + x; x = rms_norm(residual)`.

    x, residual `[tokens, size]`, weight `[size]`; returns (normed, residual), both in x's dtype. A provider may reuse
    both buffers.
    """
    residual = x + residual
    return _normalize(residual, weight, eps), residual
