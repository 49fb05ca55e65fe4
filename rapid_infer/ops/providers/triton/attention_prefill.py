"""Attention of rows with several tokens: a program per tile of a row's tokens and kv head.

All query heads that share a kv head go together, so that they share what is read of its keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention_tile import attend, finish
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options, start_next, wait_previous

QUERIES = 128
"""Query heads of a tile, all its tokens together."""
FEW_QUERIES = 64
"""The same where larger tiles would leave multiprocessors without work."""
FP32_QUERIES = 16
"""Exact products are made without tensor cores, from registers, where more would not fit."""
QUERIES_PER_WARP = 16
STAGES = 3
_ROWS_AT_ONCE = 128


@triton.jit(do_not_specialize=["table_ptr", "rows_ptr", "seq_lens_ptr", "start_ptr", "decodes", "rows"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, table_ptr, rows_ptr, seq_lens_ptr, start_ptr, decodes, rows,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, head_stride, window, scale, cap,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    head = tl.program_id(0)
    # Late tiles of a row have the most keys and start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
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
    index = tl.arange(0, M)
    dim = tl.arange(0, DIM_PAD)
    token = before + index // GROUP
    query_head = head * GROUP + index % GROUP
    exists = (index < TOKENS * GROUP) & (token < queries)
    real = exists[:, None] & (dim < DIM)[None, :]
    at = (start + token).to(tl.int64)
    q = tl.load(
        q_ptr + (at * q_stride + query_head * q_head_stride)[:, None] + dim[None, :], mask=real, other=0.0
    )  # fmt: skip
    computed = keys - queries
    # What is beyond the last token looks from there, so that it too sees no key that is not.
    position = computed + tl.minimum(token, queries - 1)
    first_position = computed + before
    end = computed + tl.minimum(before + TOKENS, queries)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    k_head, v_head = k_ptr + head * head_stride, v_ptr + head * head_stride
    # Masks only where windows begin and along the diagonal; all queries see all keys of the tiles between.
    full = (first_position + 1) // TILE * TILE
    begin = first_position * 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        entered = (tl.maximum(end - window, 0) + TILE - 1) // TILE * TILE
        acc, top, total = attend(
            acc, top, total, q, position, k_head, v_head, table, begin, tl.minimum(entered, end), keys,
            block_stride, token_stride, window, scale, cap, DIM, DIM_PAD, TILE, BLOCK_SIZE, True, True, CAP,
        )  # fmt: skip
        begin = entered
        full = tl.maximum(full, entered)
    acc, top, total = attend(
        acc, top, total, q, position, k_head, v_head, table, begin, full, keys,
        block_stride, token_stride, window, scale, cap, DIM, DIM_PAD, TILE, BLOCK_SIZE, False, False, CAP,
    )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, q, position, k_head, v_head, table, full, end, keys,
        block_stride, token_stride, window, scale, cap, DIM, DIM_PAD, TILE, BLOCK_SIZE, True, WINDOW, CAP,
    )  # fmt: skip
    out, lse = finish(acc, top, total, sinks_ptr, query_head, exists, SINKS)
    to = at * (tl.num_programs(0) * GROUP) + query_head
    tl.store(out_ptr + to[:, None] * DIM + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=real)
    if LSE:
        tl.store(lse_ptr + to, lse, mask=exists)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    metadata: AttentionMetadata,
    window: int | None,
    sinks: Tensor | None,
    scales: dict[str, Any],
    constants: dict[str, int],
) -> None:
    """Write `out` and `lse` for the tokens after the first `num_decodes`; arguments as of `decode`."""
    kv_heads, group, decodes = k_cache.shape[-2], constants["GROUP"], metadata.num_decodes
    tokens, rows = q.shape[0] - decodes, metadata.seq_lens.shape[0] - decodes
    exact = q.dtype == torch.float32
    many = tokens * group * kv_heads > QUERIES * num_multiprocessors(q.device)
    per_tile = max((FP32_QUERIES if exact else QUERIES if many else FEW_QUERIES) // group, 1)
    padded = max(triton.next_power_of_2(per_tile * group), 16)
    warps = 8 if exact else min(max(padded // QUERIES_PER_WARP, 4), 8)
    _prefill_kernel[(kv_heads, tokens // per_tile + rows)](
        q, k_cache, v_cache, out, lse if lse is not None else out, sinks if sinks is not None else q,
        metadata.block_table, metadata.rows, metadata.seq_lens, metadata.query_start, decodes, rows,
        q.stride(0), q.stride(1), metadata.block_table.stride(0), *k_cache.stride()[:3], window or 0,
        TOKENS=per_tile, M=padded, ROWS=_ROWS_AT_ONCE,
        WINDOW=window is not None, SINKS=sinks is not None, LSE=lse is not None,
        num_warps=warps, num_stages=STAGES,
        **scales, **constants, **options(q),
    )  # fmt: skip
