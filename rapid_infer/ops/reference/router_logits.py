"""A router's scores for every expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import op


@op()
def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` in fp32, of which nothing is rounded: close calls between experts are common.

    x `[tokens, hidden]`, weight `[experts, hidden]`, of one dtype; returns `[tokens, experts]` fp32.
    """
    if x.device.type == "cuda" and x.dtype is not torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
