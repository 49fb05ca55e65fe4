"""Causal attention of a step's tokens over the paged keys and values of their sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rapid_infer.cache.slots import slots_of
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import OPTIONS, AttentionParams
from rapid_infer.ops.reference.kv_cache import load_heads, read_slots
from rapid_infer.ops.registry import op


@op(info=("head_dim", "block_size", "kv_cache_dtype", *OPTIONS), capturable=False)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention in fp32; query j of a row with n keys and m queries sees keys `0 .. n - m + j`.

    q                 `[tokens, heads, head_dim]`; heads is a multiple of kv_heads (grouped queries: consecutive heads
                      share)
    k_cache, v_cache  `[blocks, block_size, kv_heads, head_dim]`, this step's tokens already written; as `kv_cache.py`
                      stores them, where the layer says `kv_cache_dtype`, with `params.kv_scales`
    returns           `[tokens, heads, head_dim]` in q's dtype; with `return_lse` also `[tokens, heads]` fp32, the
                      natural log of the softmax denominator, sinks included
    """
    heads, kv_heads = q.shape[1], k_cache.shape[-2]
    starts, lengths, rows = metadata.query_start.tolist(), metadata.seq_lens.tolist(), metadata.rows.tolist()
    out = torch.empty_like(q)
    k_scale, v_scale = (None, None) if params.kv_scales is None else params.kv_scales
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for row, start, stop, n in zip(rows, starts, starts[1:], lengths):
        # What no query sees is not read: a window's row may have given those blocks back.
        begin = 0 if params.window is None else max(n - (stop - start) - params.window + 1, 0)
        key = torch.arange(begin, n, device=q.device)
        slots = slots_of(metadata.block_table, row, key, k_cache.shape[1])
        keys, values = (
            load_heads(read_slots(cache, slots), scale, torch.float32).repeat_interleave(heads // kv_heads, dim=1)
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * params.scale
        if params.soft_cap is not None:
            scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
        position = torch.arange(n - (stop - start), n, device=q.device).unsqueeze(1)
        hidden = key > position
        if params.window is not None:
            hidden |= key <= position - params.window
        scores.masked_fill_(hidden, -math.inf)
        total = torch.logsumexp(scores, dim=-1)
        if params.sinks is not None:
            total = torch.logaddexp(total, params.sinks.float().unsqueeze(1))
        weights = torch.exp(scores - total.unsqueeze(-1))
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        lse[start:stop] = total.t()
    return (out, lse) if params.return_lse else out
