"""Experts one after another: a pair of products for each that any token wants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops import register
from rapid_infer.ops.providers.cpu.supports import not_on_cpu


@register("fused_experts", "cpu", priority=10, supports=not_on_cpu)
def fused_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None
) -> Tensor:
    """Tokens sorted by expert once, so that each expert's are a slice."""
    tokens, top_k = slots.shape
    flat = slots.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=len(gate_up) + 1).tolist()
    results = torch.empty(tokens * top_k, x.shape[1], dtype=torch.float32)
    start = counts[0]
    results[order[:start]] = 0
    for expert, count in enumerate(counts[1:]):
        if not count:
            continue
        mine = order[start : start + count]
        start += count
        gate, up = F.linear(x[mine // top_k], gate_up[expert]).chunk(2, -1)
        results[mine] = F.linear(F.silu(gate).mul_(up), down[expert]).float()
    total = torch.bmm(weights.unsqueeze(1), results.view(tokens, top_k, -1)).squeeze(1)
    return (total if shared is None else total.add_(shared)).to(x.dtype)
