"""Attention over cached latents: one gathered key matrix for all heads, two products and a softmax.

torch's own attention has no fast path on a CPU where keys and values differ in size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops import OpInfo, register
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import lacks_kv
from rapid_infer.ops.providers.cpu.attention import attention_plan
from rapid_infer.ops.providers.cpu.supports import not_on_cpu
from rapid_infer.ops.reference.kv_cache import load_latents


def _cannot(info: OpInfo) -> list[str]:
    return [*not_on_cpu(info), *lacks_kv(info, "bf16", "fp8")]


@register("mla_decode", "cpu", priority=10, supports=_cannot)
def mla_decode(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int, out: Tensor) -> None:
    """Rows of like length together."""
    plan = attention_plan(metadata, cache.shape[1], q.dtype)
    flat = cache.flatten(0, 1)
    for part in plan.decode:
        keys = flat[part.run] if part.run is not None else flat.index_select(0, part.slots)
        keys = load_latents(keys, rank, q.shape[-1] - rank, q.dtype).view(len(part.rows), -1, q.shape[-1])
        scores = torch.bmm(q[part.rows], keys.transpose(1, 2)).float().mul_(scale)
        if part.hidden is not None:
            scores += part.hidden[:, 0]
        out[part.rows] = torch.bmm(scores.softmax(-1).to(q.dtype), keys[..., :rank])
