"""Attention over cached latents: one key for all heads, whose first part is the value as well (absorbed).

Tokens that are alone in their row attend to everything, tokens in rows with several to what was there before the step;
what they see of each other is mla_prefill's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.reference.kv_cache import load_latents
from rapid_infer.ops.registry import op


def _attend(q: Tensor, keys: Tensor, scale: float, rank: int) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("qhd,kd->qhk", q.float(), keys) * scale
    return torch.einsum("qhk,kd->qhd", scores.softmax(-1), keys[:, :rank]), scores.logsumexp(-1)


def _keys(q: Tensor, cache: Tensor, metadata: AttentionMetadata, row: int, n: int, rank: int) -> Tensor:
    """The first n entries of table row `row`, fp32."""
    blocks = metadata.block_table[row, : math.ceil(n / cache.shape[1])].long()
    return load_latents(cache[blocks].flatten(0, 1)[:n], rank, q.shape[-1] - rank, torch.float32)


@op(info=("rank", "rope_dim", "block_size", "kv_cache_dtype"), mutates=("out",), capturable=False)
def mla_decode(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int, out: Tensor) -> None:
    """Softmax attention, in fp32, of tokens that are alone in their row to all keys of their rows.

    q      `[tokens, heads, rank + rope]`, already multiplied by each head's key matrix
    cache  `[blocks, block_size, rank + rope]`, or uint8 with entries as `kv_cache.py` stores them, this step's tokens
           already written; the key of a token is the whole entry, its value the first `rank` features
    out    `[tokens, heads, rank]` in q's dtype, contiguous; other tokens are left as they are. q and out may end after
           the last such token

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """
    starts, lengths, rows = metadata.query_start.tolist(), metadata.seq_lens.tolist(), metadata.rows.tolist()
    for row, start, stop, n in zip(rows, starts, starts[1:], lengths):
        if stop - start == 1:
            out[start:stop] = _attend(q[start:stop], _keys(q, cache, metadata, row, n, rank), scale, rank)[0].to(
                out.dtype
            )


@op(info=("rank", "rope_dim", "block_size", "kv_cache_dtype"), mutates=("out", "lse"), capturable=False)
def mla_context(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int, out: Tensor, lse: Tensor
) -> None:
    """Attention of tokens in rows with several to what their rows held before this step.

    Arguments as of mla_decode; a token whose row held nothing is left as it is in `out`.

    lse  `[tokens, heads]` fp32, contiguous: the natural log of the softmax denominator, minus infinity where there was
         nothing; tokens alone in their row are left as they are
    """
    starts, lengths, rows = metadata.query_start.tolist(), metadata.seq_lens.tolist(), metadata.rows.tolist()
    for row, start, stop, n in zip(rows, starts, starts[1:], lengths):
        context, mine = n - (stop - start), slice(start, stop)
        if stop - start > 1:
            lse[mine] = -math.inf
            if context:
                attended, lse[mine] = _attend(q[mine], _keys(q, cache, metadata, row, context, rank), scale, rank)
                out[mine] = attended.to(out.dtype)
