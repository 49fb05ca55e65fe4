"""torch's grouped matrix product over tokens sorted by expert; reads nothing on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops import OpInfo, register
from rapid_infer.ops.reference.silu_and_mul import silu_and_mul

ALIGNMENT = 16
"""Bytes that each row of an operand must be a multiple of."""


def _cannot(info: OpInfo) -> Sequence[str]:
    reasons = []
    if not hasattr(F, "grouped_mm"):
        reasons.append(f"torch {torch.__version__} has no grouped_mm")
    if info.device == "cuda" and info.dtype is not torch.bfloat16:
        reasons.append(f"takes bfloat16, not {str(info.dtype).removeprefix('torch.')}")
    if info.capability is not None and info.capability < (8, 0):
        reasons.append("needs SM 80 or newer, this GPU is SM {}{}".format(*info.capability))
    for name in ("hidden_size", "intermediate_size"):
        if info.extra.get(name, 0) * info.dtype.itemsize % ALIGNMENT:
            reasons.append(f"needs rows of a multiple of {ALIGNMENT} bytes, {name} is {info.extra[name]}")
    return reasons


@register("fused_experts", "grouped_mm", priority=5, supports=_cannot)
def fused_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None
) -> Tensor:
    """Rows without an expert are sorted behind all others, where the product leaves whatever was there."""
    tokens, top_k = slots.shape
    experts = len(gate_up)
    flat = slots.flatten().long()
    flat = flat.where(flat >= 0, experts)
    sorted_slots, order = flat.sort(stable=True)
    ends = torch.searchsorted(sorted_slots, torch.arange(experts, device=x.device), right=True).int()
    inner = silu_and_mul.reference(F.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends))
    values = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    unsorted = torch.empty_like(values)
    unsorted[order] = values
    # Chosen, not multiplied by zero: what was there may be NaN.
    weighted = (unsorted.float() * weights.flatten().unsqueeze(1)).where((flat < experts).unsqueeze(1), 0.0)
    total = weighted.view(tokens, top_k, -1).sum(1)
    return (total if shared is None else total + shared).to(x.dtype)
