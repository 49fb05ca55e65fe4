"""The experts of a mixture-of-experts layer: each token through its own few gated feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.reference.silu_and_mul import silu_and_mul
from rapid_infer.ops.registry import op


@op(info=("experts", "hidden_size", "intermediate_size"), capturable=False)
def fused_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None
) -> Tensor:
    """`shared + sum_k weights[:, k] * down[e] (silu(gate[e] x) * up[e] x)` with `e = slots[:, k]`.

    x        `[tokens, hidden]`
    gate_up  `[experts, 2 * size, hidden]`, the gate half first
    down     `[experts, hidden, size]`
    weights  `[tokens, top_k]` fp32
    slots    `[tokens, top_k]` int32; below zero: no expert, adds nothing
    shared   `[tokens, hidden]`, what all tokens have in common; None: nothing
    returns  `[tokens, hidden]` in x's dtype, summed in fp32
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if shared is None else shared.float()
    for expert in slots[slots >= 0].unique().tolist():
        token, place = torch.where(slots == expert)
        inner = silu_and_mul.reference(F.linear(x[token], gate_up[expert]))
        value = F.linear(inner, down[expert]).float()
        total = total.index_add(0, token, value * weights[token, place].unsqueeze(1))
    return total.to(x.dtype)
