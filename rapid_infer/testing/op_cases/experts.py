"""Cases of routers and experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rapid_infer.testing.op_cases.case import Case, cases


@cases
def fused_experts(dtype: torch.dtype, device: str) -> Iterator[Case]:
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


@cases
def route_experts(dtype: torch.dtype, device: str) -> Iterator[Case]:
    # experts, top_k, groups, top_groups, scoring, biased, renormalize, scale
    kinds = (
        (8, 2, 1, 1, "softmax", False, True, 1.0),
        (64, 6, 1, 1, "softmax", False, False, 1.0),
        (20, 6, 5, 2, "softmax", False, False, 16.0),
        (16, 4, 4, 2, "sigmoid", True, True, 2.5),
        (12, 3, 1, 1, "sigmoid", False, False, 1.0),
    )
    for i, (experts, top_k, groups, top_groups, scoring, biased, renormalize, scale) in enumerate(kinds):
        tokens = 7
        # Distinct by far more than rounding, in every order: no close call decides the test.
        order = torch.stack([torch.randperm(experts) for _ in range(tokens)]).float()
        token_mask = torch.tensor([3, 0, 1, 9, 0, 2, 1], dtype=torch.int32, device=device) if i % 2 else None
        expert_map = torch.randperm(experts).int().where(torch.arange(experts) % 5 < 4, -1) if i > 1 else None
        bias = None
        if biased:
            # Below zero for all: a mask of zeros instead of minus infinity would win.
            bias = (-2 + 0.9 * torch.rand(experts, generator=torch.Generator().manual_seed(i))).to(device)
        yield Case(
            {
                "logits": ((order - experts / 2) * (4 / experts)).to(device),
                "bias": bias,
                "token_mask": token_mask,
                "expert_map": (expert_map if expert_map is not None else torch.arange(experts).int()).to(device),
                "top_k": top_k,
                "groups": groups,
                "top_groups": top_groups,
                "scoring": scoring,
                "renormalize": renormalize,
                "scale": scale,
            },
            {"scoring": scoring, "groups": groups},
        )
