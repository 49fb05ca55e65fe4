"""The product of hidden states and the vocabulary's matrix: all scores, or only the best of each row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, hidden, vocab in ((1, 64, 97), (5, 48, 300), (70, 64, 150)):
        weight = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype)
        yield Case({"hidden": torch.randn(rows, hidden, device=device).to(dtype), "weight": weight})


def _clear_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Each row has a best token that is the best in any rounding; it stands twice in the matrix."""
    for case in _inputs(dtype, device):
        hidden, weight = case.kwargs["hidden"], case.kwargs["weight"]
        direction = (hidden.float() / hidden.float().norm(dim=1, keepdim=True)).to(dtype)
        weight[: len(hidden)] = direction
        weight[-len(hidden) :] = direction
        yield case


@op(inputs=_inputs, prepared="weight")
def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """`hidden W^T` in fp32. hidden `[n, hidden]`, weight `[vocab, hidden]`, of one dtype; returns `[n, vocab]`."""
    if hidden.device.type == "cuda" and hidden.dtype is not torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return F.linear(hidden, weight).float()


@op(inputs=_clear_inputs, prepared="weight")
def lm_head_argmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The best column of each row of `lm_head`, the lowest among equals: value fp32 `[n]`, index int64 `[n]`.

    Of a row with NaN the value is not finite, and the index of no meaning.
    """
    value, index = lm_head.reference(hidden, weight).max(dim=-1)
    return value, index
