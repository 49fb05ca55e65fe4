"""The product of activations and a weight matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, inputs, outputs in ((1, 64, 96), (5, 48, 33), (40, 128, 64)):
        x = torch.randn(rows, inputs, device=device).to(dtype)
        weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
        yield Case({"x": x, "weight": weight})


@op(inputs=_inputs, prepared="weight")
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T`. x `[tokens, in]`, weight `[out, in]`, both of one dtype; returns `[tokens, out]` in it.

    A provider may keep the weight in a layout of its own: `prepare` makes it, once, after loading.
    """
    return F.linear(x, weight)
