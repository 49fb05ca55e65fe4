"""CPU providers where the reference is slow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.registry import OpFacts, register


def _plain_attention_on_cpu(facts: OpFacts) -> Sequence[str]:
    reasons = [] if facts.device == "cpu" else [f"runs on cpu, not {facts.device}"]
    return reasons + [
        f"has no {name}" for name in ("window", "soft_cap", "sinks", "return_lse") if facts.extra.get(name)
    ]


def _row_plan(metadata: AttentionMetadata, block_size: int) -> list[tuple[int, int, int, Tensor]]:
    """(first token, one past the last, keys, blocks) of every row, read from the tensors once a step."""
    plan = metadata.plans.get("cpu")
    if plan is None:
        starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
        tables = metadata.block_table[metadata.rows, : math.ceil(max(lengths) / block_size)]
        plan = [
            (start, stop, n, table[: math.ceil(n / block_size)])
            for start, stop, n, table in zip(starts, starts[1:], lengths, tables)
        ]
        metadata.plans["cpu"] = plan
    return plan


@register("paged_attention", "cpu", priority=10, supports=_plain_attention_on_cpu)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> Tensor:
    """Gathers each row's pages once and folds the query heads of a group into the query axis.

    The fold replaces grouped-query SDPA, which is several times slower on a CPU, and repeated keys, which cost a copy.
    """
    kv_heads, dim = k_cache.shape[-2:]
    group = q.shape[1] // kv_heads
    out = torch.empty_like(q)
    for start, stop, n, blocks in _row_plan(metadata, k_cache.shape[1]):
        keys, values = (
            cache.index_select(0, blocks).view(-1, kv_heads, dim)[:n].transpose(0, 1) for cache in (k_cache, v_cache)
        )
        queries = q[start:stop]
        if stop - start == 1:
            folded = queries.view(kv_heads, group, dim)
            scores = torch.bmm(folded, keys.transpose(1, 2)).float().mul_(scale)
            weights = torch.softmax(scores, dim=-1).to(values.dtype)
            out[start] = torch.bmm(weights, values).view(-1, dim)
            continue
        mask = None
        if n > stop - start:
            mask = torch.ones(stop - start, n, dtype=torch.bool).tril_(n - (stop - start))
        heads_first = queries.transpose(0, 1).unsqueeze(0)
        keys, values = (x.repeat_interleave(group, dim=0).unsqueeze(0) for x in (keys, values))
        attended = F.scaled_dot_product_attention(
            heads_first, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        out[start:stop] = attended.squeeze(0).transpose(0, 1)
    return out
