"""Causal attention over cached latents: one key for all heads, whose first part is the value as well."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.paged_attention import make_metadata
from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    small, wide, many = (4, 16, 8, 4), (16, 64, 16, 16), (70, 24, 8, 16)
    cases = (
        ([1], [1], (small, wide, many)),
        ([7, 64, 33], [1, 1, 1], (small, wide, many)),
        ([5, 40, 9, 23], [1, 1, 9, 4], (small, wide, many)),
        ([70], [70], (small,)),
        ([130], [37], (small, wide)),
    )
    for seq_lens, query_lens, shapes in cases:
        for heads, rank, rope, size in shapes:
            metadata, blocks = make_metadata(seq_lens, query_lens, size, device)
            cache = torch.randn(blocks, size, rank + rope, device=device).to(dtype)
            q = torch.randn(sum(query_lens), heads, rank + rope, device=device).to(dtype)
            kwargs = {"q": q, "cache": cache, "metadata": metadata, "scale": (rank + rope) ** -0.5, "rank": rank}
            yield Case(kwargs, {"rank": rank, "rope_dim": rope, "block_size": size})


@op(inputs=_inputs)
def latent_attention(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int) -> Tensor:
    """Softmax attention in fp32 with one shared key per token; causal as in paged_attention.

    q        `[tokens, heads, rank + rope]`, already multiplied by each head's key matrix (absorbed)
    cache    `[blocks, block_size, rank + rope]`, this step's tokens already written; the key of a token is the whole
             entry, its value the first `rank` features
    returns  `[tokens, heads, rank]` in q's dtype

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """
    starts, lengths, rows = metadata.query_start.tolist(), metadata.seq_lens.tolist(), metadata.rows.tolist()
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    for row, start, stop, n in zip(rows, starts, starts[1:], lengths):
        blocks = metadata.block_table[row, : math.ceil(n / cache.shape[1])].long()
        keys = cache[blocks].flatten(0, 1)[:n].float()
        scores = torch.einsum("qhd,kd->hqk", q[start:stop].float(), keys) * scale
        position = torch.arange(n - (stop - start), n, device=q.device).unsqueeze(1)
        scores.masked_fill_(torch.arange(n, device=q.device) > position, -math.inf)
        out[start:stop] = torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys[:, :rank]).to(q.dtype)
    return out
