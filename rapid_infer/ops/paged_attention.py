"""Causal attention of a step's tokens over the paged keys and values of their sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rapid_infer.cache.slots import slots_of
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import OPTIONS, AttentionParams
from rapid_infer.ops.registry import Case, op


def make_metadata(
    seq_lens: list[int], query_lens: list[int], block_size: int, device: str, spare_blocks: int = 2
) -> tuple[AttentionMetadata, int]:
    """Metadata with shuffled blocks for tests and benchmarks; returns it and the number of blocks.

    Rows of one token come first.
    """
    rows = len(seq_lens)
    per_row = max(math.ceil(n / block_size) for n in seq_lens)
    blocks = 1 + rows * per_row + spare_blocks
    table = torch.randperm(blocks - 1)[: rows * per_row].view(rows, per_row).int() + 1
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(seq_lens, query_lens)])
    row_of = torch.repeat_interleave(torch.arange(rows), torch.tensor(query_lens))
    slots = slots_of(table, row_of, positions, block_size)
    start = torch.tensor([0, *query_lens]).cumsum(0).int()
    metadata = AttentionMetadata(
        block_table=table.to(device),
        rows=torch.arange(rows, device=device),
        query_start=start.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        slots=slots.to(device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=query_lens.count(1),
    )
    return metadata, blocks


def in_mixed_graph(metadata: AttentionMetadata, rows: int, tokens: int) -> AttentionMetadata:
    """The same step as a CUDA graph of mixed steps has it, with that many rows and tokens of padding at the end."""
    zeros = torch.zeros(rows, dtype=torch.int32, device=metadata.rows.device)
    return replace(
        metadata,
        rows=torch.cat((metadata.rows, zeros)),
        query_start=torch.cat((metadata.query_start, metadata.query_start[-1:].expand(rows))),
        seq_lens=torch.cat((metadata.seq_lens, zeros)),
        slots=torch.cat((metadata.slots, metadata.slots.new_zeros(tokens))),
        num_decodes=len(metadata.rows) + rows,
        decodes=torch.tensor([metadata.num_decodes], dtype=torch.int32, device=metadata.rows.device),
        max_context_len=None,
        plans={},
    )


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    batches = (([1], [1]), ([7, 64, 33], [1, 1, 1]), ([5, 40, 9, 23], [1, 1, 9, 4]), ([130], [130]), ([130], [37]))
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"window": 6},
        {"soft_cap": 3.0},
        {"sinks": True},
        {"return_lse": True},
        {"window": 5, "soft_cap": 2.0, "sinks": True, "return_lse": True},
    )
    for i, (seq_lens, query_lens) in enumerate(batches):
        for heads, kv_heads, dim, size in ((4, 4, 16, 4), (6, 2, 32, 16), (8, 1, 64, 16)):
            for variant in variants if i == 2 else variants[:1]:
                metadata, blocks = make_metadata(seq_lens, query_lens, size, device)
                k, v = (torch.randn(blocks, size, kv_heads, dim, device=device).to(dtype) for _ in range(2))
                sinks = {"sinks": torch.randn(heads, device=device)} if variant.get("sinks") else {}
                params = AttentionParams(dim**-0.5, **(variant | sinks))
                q = torch.randn(sum(query_lens), heads, dim, device=device).to(dtype)
                kwargs = {"q": q, "k_cache": k, "v_cache": v, "metadata": metadata, "params": params}
                yield Case(kwargs, {"head_dim": dim, "block_size": size, **params.facts()})


@op(inputs=_inputs, facts=("head_dim", "block_size", *OPTIONS), capturable=False)
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
    k_cache, v_cache  `[blocks, block_size, kv_heads, head_dim]`, this step's tokens already written
    returns           `[tokens, heads, head_dim]` in q's dtype; with `return_lse` also `[tokens, heads]` fp32, the
                      natural log of the softmax denominator, sinks included
    """
    heads, kv_heads = q.shape[1], k_cache.shape[-2]
    starts, lengths, rows = metadata.query_start.tolist(), metadata.seq_lens.tolist(), metadata.rows.tolist()
    out = torch.empty(q.shape[0], heads, v_cache.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for row, start, stop, n in zip(rows, starts, starts[1:], lengths):
        # What no query sees is not read: a window's row may have given those blocks back.
        begin = 0 if params.window is None else max(n - (stop - start) - params.window + 1, 0)
        key = torch.arange(begin, n, device=q.device)
        slots = slots_of(metadata.block_table, row, key, k_cache.shape[1])
        keys, values = (
            cache.flatten(0, 1)[slots].float().repeat_interleave(heads // kv_heads, dim=1)
            for cache in (k_cache, v_cache)
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
