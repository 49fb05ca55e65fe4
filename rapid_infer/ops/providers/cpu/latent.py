"""Attention over cached latents: one gathered key matrix for all heads, products of few calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
        rows = len(part.rows)
        keys = flat[part.run] if part.run is not None else flat.index_select(0, part.slots)
        keys = keys.view(rows, 1, -1, width)
        attended = F.scaled_dot_product_attention(
            q[part.rows].unsqueeze(1), keys, keys[..., :rank], attn_mask=part.hidden, scale=scale
        )
        out[part.rows] = attended.squeeze(1)
    for chunk in plan.chunks:
        keys = flat.index_select(0, chunk.slots)
        queries = q[chunk.start : chunk.stop]
        visible = chunk.visible
        if visible is None:
            visible = torch.ones(len(queries), len(keys), dtype=torch.bool).tril_()
        # Every head of a token sees what the token sees.
        visible = visible.repeat_interleave(heads, dim=0)
        attended = F.scaled_dot_product_attention(
            queries.reshape(1, -1, width), keys.unsqueeze(0), keys[None, :, :rank], attn_mask=visible, scale=scale
        )
        out[chunk.start : chunk.stop] = attended.view(len(queries), heads, rank)
    return out
