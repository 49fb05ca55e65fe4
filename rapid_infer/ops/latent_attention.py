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
from rapid_infer.ops.paged_attention import in_mixed_graph, make_metadata
from rapid_infer.ops.registry import Case, op

SMALL, WIDE, MANY = (4, 16, 8, 4), (16, 64, 16, 16), (70, 24, 8, 16)
"""heads, rank, rope, block size"""


def _case(
    seq_lens: list[int],
    query_lens: list[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    padding: tuple[int, int] | None = None,
) -> Case:
    """`padding`: rows and tokens, of a step whose number of decode rows only the device knows."""
    heads, rank, rope, size = shape
    metadata, blocks = make_metadata(seq_lens, query_lens, size, device)
    if padding is not None:
        metadata = in_mixed_graph(metadata, *padding)
    tokens = len(metadata.slots)
    cache = torch.randn(blocks, size, rank + rope, device=device).to(dtype)
    q = torch.randn(tokens, heads, rank + rope, device=device).to(dtype)
    out = torch.randn(tokens, heads, rank, device=device).to(dtype)
    kwargs = {"q": q, "cache": cache, "metadata": metadata, "scale": (rank + rope) ** -0.5, "rank": rank, "out": out}
    return Case(kwargs, {"rank": rank, "rope_dim": rope, "block_size": size})


def _decode_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for seq_lens, query_lens in (([1], [1]), ([7, 64, 33], [1, 1, 1]), ([5, 40, 9, 23], [1, 1, 9, 4])):
        for shape in (SMALL, WIDE, MANY):
            yield _case(seq_lens, query_lens, shape, dtype, device)
    for query_lens, padding in (([1, 1, 9, 4], (3, 5)), ([1, 1, 1, 1], (0, 2))):
        yield _case([5, 40, 9, 23], query_lens, SMALL, dtype, device, padding)


def _context_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for seq_lens, query_lens, padding, shapes in (
        ([5, 40, 9, 23], [1, 1, 9, 4], None, (SMALL, WIDE, MANY)),
        ([130], [37], None, (SMALL, WIDE)),
        ([30, 64, 2], [14, 32, 2], None, (SMALL,)),
        ([5, 40, 9, 23], [1, 1, 9, 4], (3, 5), (SMALL,)),
        ([30, 64, 2], [14, 32, 2], (1, 0), (SMALL,)),
    ):
        for shape in shapes:
            case = _case(seq_lens, query_lens, shape, dtype, device, padding)
            case.kwargs["lse"] = torch.randn(case.kwargs["q"].shape[:2], device=device)
            yield case


def _attend(q: Tensor, keys: Tensor, scale: float, rank: int) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("qhd,kd->qhk", q.float(), keys) * scale
    return torch.einsum("qhk,kd->qhd", scores.softmax(-1), keys[:, :rank]), scores.logsumexp(-1)


def _keys(cache: Tensor, metadata: AttentionMetadata, row: int, n: int) -> Tensor:
    """The first n entries of table row `row`, fp32."""
    blocks = metadata.block_table[row, : math.ceil(n / cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:n].float()


@op(inputs=_decode_inputs, facts=("rank", "rope_dim", "block_size"), mutates=("out",), capturable=False)
def latent_decode(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int, out: Tensor) -> None:
    """Softmax attention, in fp32, of tokens that are alone in their row to all keys of their rows.

    q      `[tokens, heads, rank + rope]`, already multiplied by each head's key matrix
    cache  `[blocks, block_size, rank + rope]`, this step's tokens already written; the key of a token is the whole
           entry, its value the first `rank` features
    out    `[tokens, heads, rank]` in q's dtype, contiguous; other tokens are left as they are. q and out may end after
           the last such token

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """
    starts, lengths, rows = metadata.query_start.tolist(), metadata.seq_lens.tolist(), metadata.rows.tolist()
    for row, start, stop, n in zip(rows, starts, starts[1:], lengths):
        if stop - start == 1:
            out[start:stop] = _attend(q[start:stop], _keys(cache, metadata, row, n), scale, rank)[0].to(out.dtype)


@op(inputs=_context_inputs, facts=("rank", "rope_dim", "block_size"), mutates=("out", "lse"), capturable=False)
def latent_context(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int, out: Tensor, lse: Tensor
) -> None:
    """Attention of tokens in rows with several to what their rows held before this step.

    Arguments as of latent_decode; a token whose row held nothing is left as it is in `out`.

    lse  `[tokens, heads]` fp32, contiguous: the natural log of the softmax denominator, minus infinity where there was
         nothing; tokens alone in their row are left as they are
    """
    starts, lengths, rows = metadata.query_start.tolist(), metadata.seq_lens.tolist(), metadata.rows.tolist()
    for row, start, stop, n in zip(rows, starts, starts[1:], lengths):
        context, mine = n - (stop - start), slice(start, stop)
        if stop - start > 1:
            lse[mine] = -math.inf
            if context:
                attended, lse[mine] = _attend(q[mine], _keys(cache, metadata, row, context), scale, rank)
                out[mine] = attended.to(out.dtype)
