"""The implementation, which is imported when a layer binds it."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer_op_cuda.build import load


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds in place to `residual`, as the operator allows."""
    x, residual = x.contiguous(), residual.contiguous()
    out = torch.empty_like(x)
    # On "meta" the runtime asks which kernels of Triton a model launches; this is none.
    if x.device.type != "meta":
        load()
        torch.ops.rapid_infer_op_cuda.add_rms_norm(x, residual, weight, eps, out)
    return out, residual
