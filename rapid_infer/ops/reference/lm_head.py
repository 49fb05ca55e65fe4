"""The product of hidden states and the vocabulary's matrix: all scores, or only the best of each row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import op


@op(prepared="weight")
def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden W^T` in fp32. hidden `[n, hidden]`, weight `[vocab, hidden]`, of one dtype; returns `[n, vocab]`."""
    if hidden.device.type == "cuda" and hidden.dtype is not torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return F.linear(hidden, weight).float()


@op(prepared="weight")
def lm_head_argmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The best column of each row of `lm_head`, the lowest among equals: value fp32 `[n]`, index int64 `[n]`.

    Of a row with NaN the value is not finite, and the index of no meaning.
    """
    value, index = lm_head.reference(hidden, weight).max(dim=-1)
    return value, index
