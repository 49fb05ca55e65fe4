"""Attention over cached latents: one gathered key matrix for all heads, two products and a softmax.

torch's own attention has no fast path on a CPU where keys and values differ in size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.cpu.attention import attention_plan
from rapid_infer.ops.providers.cpu.facts import not_on_cpu
from rapid_infer.ops.registry import register


@register("latent_attention", "cpu", priority=10, supports=not_on_cpu)
def latent_attention(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int) -> Tensor:
    """Decode rows of like length together, longer queries one row at a time; a token's heads stand side by side."""
    plan = attention_plan(metadata, cache.shape[1], q.dtype)
    heads, width = q.shape[1:]
    flat = cache.view(-1, width)
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype)
    for part in plan.decode:
        keys = flat[part.run] if part.run is not None else flat.index_select(0, part.slots)
        keys = keys.view(len(part.rows), -1, width)
        scores = _scores(q[part.rows], keys, scale)
        if part.hidden is not None:
            scores += part.hidden[:, 0]
        out[part.rows] = _values(scores, keys, rank)
    for chunk in plan.chunks:
        keys = flat.index_select(0, chunk.slots).unsqueeze(0)
        tokens = chunk.stop - chunk.start
        scores = _scores(q[chunk.start : chunk.stop].reshape(1, -1, width), keys, scale)
        visible = chunk.visible
        if visible is None:
            visible = torch.ones(tokens, tokens, dtype=torch.bool).tril_()
        # Every head of a token sees what the token sees.
        scores.view(tokens, heads, -1).masked_fill_(~visible.unsqueeze(1), -math.inf)
        out[chunk.start : chunk.stop] = _values(scores, keys, rank).view(tokens, heads, rank)
    return out


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """`[rows, queries, keys]` fp32."""
    return torch.bmm(q, keys.transpose(1, 2)).float().mul_(scale)


def _values(scores: Tensor, keys: Tensor, rank: int) -> Tensor:
    return torch.bmm(scores.softmax(-1).to(keys.dtype), keys[..., :rank])
