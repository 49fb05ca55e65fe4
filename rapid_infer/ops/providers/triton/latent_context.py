"""Latent attention of rows with several tokens to earlier ones: a program per tile of tokens and block of heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention_tile import finish
from rapid_infer.ops.providers.triton.latent_tile import attend_latent, check_strides, latent_shape, load_query
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

QUERIES = 64
"""Query heads of a tile, all its tokens together: their results stay in registers."""
FP32_QUERIES = 16
WARPS = 8
STAGES = 2
_ROWS_AT_ONCE = 128


@triton.jit(do_not_specialize=["table_ptr", "rows_ptr", "seq_lens_ptr", "start_ptr", "decodes", "rows"])
def _context_kernel(
    q_ptr, cache_ptr, out_ptr, lse_ptr, table_ptr, rows_ptr, seq_lens_ptr, start_ptr, decodes, rows,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, scale,
    HEAD_BLOCKS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    block = tl.program_id(0)
    tile = tl.program_id(1)
    wait_previous(PDL)
    # Row i's tiles start at its first token / TOKENS + i: never fewer than it needs, and at most one more.
    start_ptr += decodes
    starting = 0
    for at in range(0, rows, ROWS):
        nth = at + tl.arange(0, ROWS)
        start = tl.load(start_ptr + nth, mask=nth < rows, other=0) - decodes
        starting += tl.sum(((start // TOKENS + nth <= tile) & (nth < rows)).to(tl.int32))
    row = starting - 1
    start = tl.load(start_ptr + row)
    queries = tl.load(start_ptr + row + 1) - start
    before = (tile - (start - decodes) // TOKENS - row) * TOKENS
    if before >= queries:
        return
    keys = tl.load(seq_lens_ptr + decodes + row)
    table = table_ptr + tl.load(rows_ptr + decodes + row) * table_stride
    nth = tl.arange(0, M)
    token = before + nth // GROUP
    head = block * GROUP + nth % GROUP
    exists = (nth < TOKENS * GROUP) & (token < queries)
    at = (start - decodes + token).to(tl.int64)
    q_latent, q_rope = load_query(
        q_ptr, at * q_stride + head * q_head_stride, exists, RANK, RANK_PAD, ROPE, ROPE_PAD
    )  # fmt: skip
    context = keys - queries
    full = context // TILE * TILE
    position = tl.full([M], 0, tl.int32) + context - 1
    acc = tl.zeros([M, RANK_PAD], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc, top, total = attend_latent(
        acc, top, total, q_latent, q_rope, position, cache_ptr, table, full * 0, full, context,
        block_stride, token_stride, scale, RANK, RANK_PAD, ROPE, ROPE_PAD, TILE, BLOCK_SIZE, False,
    )  # fmt: skip
    acc, top, total = attend_latent(
        acc, top, total, q_latent, q_rope, position, cache_ptr, table, full, context, context,
        block_stride, token_stride, scale, RANK, RANK_PAD, ROPE, ROPE_PAD, TILE, BLOCK_SIZE, True,
    )  # fmt: skip
    out, lse = finish(acc, top, total, q_ptr, head, exists, False)
    index = tl.arange(0, RANK_PAD)
    to = (at * (HEAD_BLOCKS * GROUP) + head)[:, None] * RANK + index[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (index < RANK)[None, :])
    tl.store(lse_ptr + at * (HEAD_BLOCKS * GROUP) + head, lse, mask=exists)


def latent_context(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """Reads no tensor on the host; a program whose row has no context ends at once."""
    q = check_strides(q, cache)
    most = FP32_QUERIES if q.dtype == torch.float32 else QUERIES
    shape, decodes = latent_shape(q, cache, scale, rank, most), metadata.num_decodes
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    tokens, rows = q.shape[0], metadata.seq_lens.shape[0] - decodes
    if not tokens:
        return out, lse
    per_tile = max(most // shape.group, 1)
    _context_kernel[(shape.head_blocks, tokens // per_tile + rows)](
        q, cache, out, lse, metadata.block_table, metadata.rows, metadata.seq_lens, metadata.query_start, decodes, rows,
        q.stride(0), q.stride(1), metadata.block_table.stride(0), cache.stride(0), cache.stride(1),
        HEAD_BLOCKS=shape.head_blocks, GROUP=shape.group, TOKENS=per_tile,
        M=max(triton.next_power_of_2(per_tile * shape.group), 16), ROWS=_ROWS_AT_ONCE,
        num_warps=WARPS, num_stages=STAGES, **shape.constants, **options(q),
    )  # fmt: skip
    return out, lse
