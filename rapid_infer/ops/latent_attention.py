"""Attention over cached latents: one key for all heads, whose first part is the value as well (absorbed).

Tokens that are alone in their row attend to everything, tokens in rows with several to what was there before the step;
what they see of each other is latent_prefill's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.paged_attention import make_metadata
from rapid_infer.ops.registry import Case, op

SMALL, WIDE, MANY = (4, 16, 8, 4), (16, 64, 16, 16), (70, 24, 8, 16)
"""heads, rank, rope, block size"""


def _case(
    seq_lens: list[int], query_lens: list[int], shape: tuple[int, ...], tokens: int, dtype: torch.dtype, device: str
) -> Case:
    heads, rank, rope, size = shape
    metadata, blocks = make_metadata(seq_lens, query_lens, size, device)
    cache = torch.randn(blocks, size, rank + rope, device=device).to(dtype)
    q = torch.randn(tokens, heads, rank + rope, device=device).to(dtype)
    kwargs = {"q": q, "cache": cache, "metadata": metadata, "scale": (rank + rope) ** -0.5, "rank": rank}
    return Case(kwargs, {"rank": rank, "rope_dim": rope, "block_size": size})


def _decode_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for seq_lens, query_lens in (([1], [1]), ([7, 64, 33], [1, 1, 1]), ([5, 40, 9, 23], [1, 1, 9, 4])):
        for shape in (SMALL, WIDE, MANY):
            yield _case(seq_lens, query_lens, shape, query_lens.count(1), dtype, device)


def _context_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for seq_lens, query_lens, shapes in (
        ([5, 40, 9, 23], [1, 1, 9, 4], (SMALL, WIDE, MANY)),
        ([130], [37], (SMALL, WIDE)),
        ([30, 64, 2], [14, 32, 2], (SMALL,)),
    ):
        for shape in shapes:
            tokens = sum(query_lens) - query_lens.count(1)
            yield _case(seq_lens, query_lens, shape, tokens, dtype, device)


def _attend(q: Tensor, keys: Tensor, scale: float, rank: int) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("qhd,kd->qhk", q.float(), keys) * scale
    return torch.einsum("qhk,kd->qhd", scores.softmax(-1), keys[:, :rank]), scores.logsumexp(-1)


def _keys(cache: Tensor, metadata: AttentionMetadata, row: int, n: int) -> Tensor:
    """The first n entries of table row `row`, fp32."""
    blocks = metadata.block_table[row, : math.ceil(n / cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:n].float()


@op(inputs=_decode_inputs)
def latent_decode(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int) -> Tensor:
    """Softmax attention, in fp32, of the step's first `num_decodes` tokens to all keys of their rows.

    q        `[num_decodes, heads, rank + rope]`, already multiplied by each head's key matrix
    cache    `[blocks, block_size, rank + rope]`, this step's tokens already written; the key of a token is the whole
             entry, its value the first `rank` features
    returns  `[num_decodes, heads, rank]` in q's dtype

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """
    lengths, rows = metadata.seq_lens.tolist(), metadata.rows.tolist()
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    for i in range(len(q)):
        out[i] = _attend(q[i : i + 1], _keys(cache, metadata, rows[i], lengths[i]), scale, rank)[0].to(q.dtype)[0]
    return out


@op(inputs=_context_inputs)
def latent_context(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens after the first `num_decodes` to what their rows held before this step.

    Arguments as of latent_decode, q `[tokens - num_decodes, heads, rank + rope]`. Returns `[.., heads, rank]` in q's
    dtype and `[.., heads]` fp32, the natural log of the softmax denominator: zeros and minus infinity where there was
    nothing.
    """
    starts, lengths, rows = metadata.query_start.tolist(), metadata.seq_lens.tolist(), metadata.rows.tolist()
    first = metadata.num_decodes
    out = torch.zeros(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for row, start, stop, n in zip(rows[first:], starts[first:], starts[first + 1 :], lengths[first:]):
        context, mine = n - (stop - start), slice(start - starts[first], stop - starts[first])
        if context:
            attended, lse[mine] = _attend(q[mine], _keys(cache, metadata, row, context), scale, rank)
            out[mine] = attended.to(q.dtype)
    return out, lse
