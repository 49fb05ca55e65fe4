"""A router's scores for every expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for tokens, hidden, experts in ((1, 64, 8), (5, 48, 20), (70, 128, 64)):
        weight = (torch.randn(experts, hidden, device=device) / hidden**0.5).to(dtype)
        yield Case({"x": torch.randn(tokens, hidden, device=device).to(dtype), "weight": weight})


@op(inputs=_inputs)
def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` in fp32, of which nothing is rounded: close calls between experts are common.

    x `[tokens, hidden]`, weight `[experts, hidden]`, of one dtype; returns `[tokens, experts]` fp32.
    """
    if x.device.type == "cuda" and x.dtype is not torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
