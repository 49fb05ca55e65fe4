"""Attention of decode rows to the cache blocks that they share (see attention_groups): read once for many rows.

The query heads of a kv head of up to `pack` rows make one tile of queries. The decode kernel, which runs next, attends
the rest of each row and takes these results in where the row starts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton import attention_groups
from rapid_infer.ops.providers.triton.attention_groups import SharedPlan
from rapid_infer.ops.providers.triton.attention_plan import row_part
from rapid_infer.ops.providers.triton.attention_tile import add_parts, attend
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

SHARING = True
"""For measurements: False makes every row read all its keys."""
QUERIES = 64
"""Query heads of a tile, all its rows together."""
FEW_QUERIES = 64
"""The same where all rows fit."""
FP32_QUERIES = 16
"""Exact products are made without tensor cores, from registers, where more would not fit."""
ADDED_AT_ONCE = 4096
"""Elements of results that a program of the decode kernel reads at once."""
QUERIES_PER_WARP = 16
STAGES = 2


def rows_per_item(q: Tensor, metadata: AttentionMetadata, window: int | None, constants: dict[str, int]) -> int:
    """How many rows read shared blocks together; 0 where none may: by shapes and bounds, never by lengths."""
    rows, group, block_size = metadata.num_decodes, constants["GROUP"], constants["BLOCK_SIZE"]
    possible = metadata.max_seq_len > attention_groups.MIN_BLOCKS * block_size
    whole = block_size % constants["TILE"] == 0
    if not (SHARING and 2 <= rows <= attention_groups.MAX_ROWS and window is None and possible and whole):
        return 0
    queries = _queries(q, rows, group) // group
    return queries if queries >= 2 else 0


def _queries(q: Tensor, rows: int, group: int) -> int:
    if q.dtype == torch.float32:
        return FP32_QUERIES
    return FEW_QUERIES if rows * group <= FEW_QUERIES else QUERIES


@triton.jit
def load_first(
    takes, first_slice, partial_ptr, stats_ptr, row, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """(part `[GROUP_PAD, DIM_PAD]`, top and total `[GROUP_PAD]`) of what a row shares in its first slice, if it takes.

    Asked for before the row's own keys are, so that it comes along with them.
    """
    group, dim = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    place = (row + first_slice * PACK) * KV_HEADS + head
    exists = takes & (group < GROUP)
    stats = stats_ptr + place * (2 * GROUP) + group
    top = tl.load(stats, mask=exists, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + GROUP, mask=exists, other=0.0, cache_modifier=".cg")
    at = (place * GROUP + group)[:, None] * DIM_PAD + dim[None, :]
    return tl.load(partial_ptr + at, mask=exists[:, None], other=0.0, cache_modifier=".cg"), top, total


@triton.jit
def add_shared(
    acc, top, total, part, part_top, part_total, first_slice, slices, partial_ptr, stats_ptr, row, head, group,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr, PACK: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """(acc `[M, DIM_PAD]`, top and total `[M]`) of a row's `group` `[M]` of query heads, with what it shares taken in.

    Always in the order of slices; the first one's part is at hand.
    """
    M: tl.constexpr = acc.shape[0]
    TIMES: tl.constexpr = M // GROUP_PAD
    # What stands beyond the group is never looked at, so the group may be repeated there.
    part_top = tl.reshape(tl.broadcast_to(part_top[None, :], [TIMES, GROUP_PAD]), [M])
    part_total = tl.reshape(tl.broadcast_to(part_total[None, :], [TIMES, GROUP_PAD]), [M])
    part = tl.reshape(tl.broadcast_to(part[None, :, :], [TIMES, GROUP_PAD, DIM_PAD]), [M, DIM_PAD])
    higher = tl.maximum(top, part_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(part_top - base)
    shrink = tl.exp2(top - base)
    total = total * shrink + part_total * weight
    acc = acc * shrink[:, None] + part * weight[:, None]
    top = higher
    for start in range(1, slices, COUNT):
        nth = start + tl.arange(0, COUNT)
        place = (row + (first_slice + nth) * PACK) * KV_HEADS + head
        acc, top, total = add_parts(acc, top, total, partial_ptr, stats_ptr, place, nth < slices, group, GROUP, DIM_PAD)
    return acc, top, total


@triton.jit(do_not_specialize=["table_ptr", "rows_ptr"])
def _shared_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr,
    item_first_ptr, items_ptr, slice_item_ptr, quota_ptr, partial_ptr, stats_ptr,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, head_stride, scale, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ITEM_COST: tl.constexpr,
    CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    slice = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    wait_previous(PDL)
    quota = tl.load(quota_ptr)
    if quota == 0:
        return
    index = tl.arange(0, M)
    nth = index // GROUP
    group = index % GROUP
    dim = tl.arange(0, DIM_PAD)
    for item in range(tl.load(slice_item_ptr + slice), tl.load(slice_item_ptr + slice + 1) + 1):
        begin, end, _, _ = row_part(item_first_ptr, item, slice, quota, ITEM_COST)
        if begin < end:
            first_row = tl.load(items_ptr + item * 2)
            exists = nth < tl.load(items_ptr + item * 2 + 1)
            # All its rows have the same blocks here.
            table = table_ptr + tl.load(rows_ptr + first_row) * table_stride
            q_at = q_ptr + ((first_row + nth) * q_stride + (head * GROUP + group) * q_head_stride)[:, None]
            q = tl.load(q_at + dim[None, :], mask=exists[:, None] & (dim < DIM)[None, :], other=0.0)
            acc, top, total = attend(
                tl.zeros([M, DIM_PAD], tl.float32),
                tl.full([M], float("-inf"), tl.float32),
                tl.zeros([M], tl.float32),
                q, index, k_ptr + head * head_stride, v_ptr + head * head_stride, table,
                begin * TILE, end * TILE, end * TILE, block_stride, token_stride,
                0, scale, cap, DIM, DIM_PAD, TILE, BLOCK_SIZE, False, False, CAP,
            )  # fmt: skip
            place = (first_row + nth + slice * PACK) * KV_HEADS + head
            at = place * GROUP + group
            tl.store(partial_ptr + at[:, None] * DIM_PAD + dim[None, :], acc, mask=exists[:, None])
            stats = stats_ptr + place * (2 * GROUP) + group
            tl.store(stats, top, mask=exists)
            tl.store(stats + GROUP, total, mask=exists)


def attend_shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    plan: SharedPlan,
    scales: dict[str, Any],
    constants: dict[str, int],
) -> None:
    """Write the plan's `partial` and `stats` for this layer; arguments as of `decode`."""
    kv_heads, group = k_cache.shape[-2], constants["GROUP"]
    exact = q.dtype == torch.float32
    padded = max(_queries(q, metadata.num_decodes, group), 16)
    _shared_kernel[(plan.slices * kv_heads,)](
        q, k_cache, v_cache, metadata.block_table, metadata.rows,
        plan.item_first, plan.items, plan.slice_item, plan.quota, plan.partial, plan.stats,
        q.stride(0), q.stride(1), metadata.block_table.stride(0), *k_cache.stride()[:3],
        KV_HEADS=kv_heads, PACK=plan.pack, M=padded, ITEM_COST=attention_groups.ITEM_COST,
        num_warps=8 if exact else min(max(padded // QUERIES_PER_WARP, 4), 8), num_stages=STAGES,
        **scales, **constants, **options(q),
    )  # fmt: skip
