"""The experts of a mixture-of-experts layer: each token through its own few gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import Case, op
from rapid_infer.ops.silu_and_mul import silu_and_mul


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    shapes = ((1, 32, 48, 8, 3), (5, 64, 32, 4, 2), (40, 48, 80, 6, 2), (90, 32, 16, 3, 2), (3, 64, 32, 16, 1))
    for i, (tokens, hidden, size, experts, top_k) in enumerate(shapes):
        slots = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
        weights = torch.rand(tokens, top_k)
        if i > 1:
            # A token without experts, an expert that lives elsewhere, and one that nobody wants.
            slots[0], slots[1, 0] = -1, -1
            slots[slots == experts - 1] = -1
            weights[slots < 0] = 0
        gate_up = torch.randn(experts, 2 * size, hidden, device=device) / hidden**0.5
        down = torch.randn(experts, hidden, size, device=device) / size**0.5
        yield Case(
            {
                "x": torch.randn(tokens, hidden, device=device).to(dtype),
                "gate_up": gate_up.to(dtype),
                "down": down.to(dtype),
                "weights": weights.to(device),
                "slots": slots.to(device),
                "shared": torch.randn(tokens, hidden, device=device).to(dtype) if i % 2 else None,
            },
            {"experts": experts, "hidden_size": hidden, "intermediate_size": size},
        )


@op(inputs=_inputs, facts=("experts", "hidden_size", "intermediate_size"), capturable=False)
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
