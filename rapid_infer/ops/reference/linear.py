"""The product of activations and a weight matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import op


@op(prepared="weight")
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T`. x `[tokens, in]`, weight `[out, in]`, both of one dtype; returns `[tokens, out]` in it.

    A provider may keep the weight in a layout of its own: `prepare` makes it, once, after loading.
    """
    return F.linear(x, weight)
