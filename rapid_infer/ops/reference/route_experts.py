"""From a router's scores to each token's experts and their weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rapid_infer.ops.registry import op

SCORING = ("softmax", "sigmoid")


@op(info=("scoring", "groups"))
def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    token_mask: Tensor | None,
    expert_map: Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Each token's `top_k` best experts, best first, out of its `top_groups` best groups.

    logits       `[tokens, experts]` fp32
    bias         `[experts]` fp32, added to the scores for the choice only
    token_mask   `[tokens]` integers, 0 for a padding token, which gets no expert; None: there is none
    expert_map   `[experts]` int32: where this rank holds each expert, below zero for one that it does not
    groups       of neighbouring experts, all of one size; a group is worth its best score, or, with a bias, the sum of
                 its two best
    scoring      "softmax" over all experts, or "sigmoid" of each
    renormalize  divide the chosen scores by their sum; `scale` then multiplies them, once
    returns      weights `[tokens, top_k]` fp32 and slots `[tokens, top_k]` int32; slot -1 and weight 0 for no expert

    Sources: DeepSeek-AI 2024 (DeepSeek-V2), section 2.2, and 2025 (DeepSeek-V3), section 2.1.2.
    """
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        worth = grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)
        out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, worth.topk(top_groups, dim=-1).indices, False)
        # Not zero: with a bias the scores left in may be below it.
        choice = grouped.masked_fill(out.unsqueeze(-1), -math.inf).flatten(1)
    chosen = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    where = expert_map[chosen]
    if token_mask is not None:
        where = where.where((token_mask > 0).unsqueeze(1), -1)
    return (weights * scale).where(where >= 0, 0.0), where.where(where >= 0, -1).int()
