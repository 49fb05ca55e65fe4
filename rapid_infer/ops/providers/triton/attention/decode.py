"""Attention of rows with one token: a program per slice of the work (see `plan.py`) and kv head.

All query heads that share a kv head go together, padded to what a tensor core takes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention import groups
from rapid_infer.ops.providers.triton.attention.plan import decode_plan, first_tile, row_part
from rapid_infer.ops.providers.triton.attention.shared import (
    arrive,
    attend_shared,
    queries_per_item,
    rows_per_item,
    shared_by,
)
from rapid_infer.ops.providers.triton.attention.tile import (
    add_parts,
    attend,
    last_to_arrive,
    store_part,
    write_row,
)
from rapid_infer.ops.providers.triton.kv_values import head_scales, queries_for_fp8
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

WARPS = 4
STAGES = 3
COMBINED_AT_ONCE = 8192
"""Elements of partial results that a program reads at once."""


@triton.jit
def leave_part(
    acc, top, total, partial_ptr, stats_ptr, arrived_ptr, slice, first_slice, slices, head, group,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Leave what a slice gives of a row that lies in several; whether it was the last, so that `combine` may follow."""
    place = (slice * 2 + (slice == first_slice).to(tl.int32)) * KV_HEADS + head
    store_part(acc, top, total, partial_ptr, stats_ptr, place, group, group < GROUP, GROUP, DIM_PAD)
    return last_to_arrive(arrived_ptr + first_slice * KV_HEADS + head, slices)


@triton.jit
def combine(
    partial_ptr, stats_ptr, first_slice, slices, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """(acc `[GROUP_PAD, DIM_PAD]`, top and total `[GROUP_PAD]`) of a row, always added up in the order of slices."""
    group = tl.arange(0, GROUP_PAD)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    for start in range(0, slices, COUNT):
        nth = start + tl.arange(0, COUNT)
        # The row starts in its first slice, second place, and runs into the others, first place.
        place = ((first_slice + nth) * 2 + (nth == 0).to(tl.int32)) * KV_HEADS + head
        acc, top, total = add_parts(acc, top, total, partial_ptr, stats_ptr, place, nth < slices, group, GROUP, DIM_PAD)
    return acc, top, total


@triton.jit
def _row_done(
    acc, top, total, out_ptr, lse_ptr, sinks_ptr, partial_ptr, stats_ptr, row, head, group, skipped,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PACK: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write a row's result, or, of a row that shares tiles besides, leave it for those."""
    if PACK == 0:
        write_row(
            acc, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, group,
            KV_HEADS, GROUP, DIM, DIM_PAD, SINKS, LSE,
        )  # fmt: skip
    else:
        if skipped > 0:
            store_part(
                acc, top, total, partial_ptr, stats_ptr, row * KV_HEADS + head, group, group < GROUP, GROUP, DIM_PAD
            )
        else:
            write_row(
                acc, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, group,
                KV_HEADS, GROUP, DIM, DIM_PAD, SINKS, LSE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["table_ptr", "rows_ptr", "seq_lens_ptr", "rows"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, table_ptr, rows_ptr, seq_lens_ptr,
    first_ptr, slice_row_ptr, quota_ptr, arrived_ptr, partial_ptr, stats_ptr,
    shared_ptr, item_first_ptr, order_ptr, items_ptr, slice_item_ptr, shared_quota_ptr, item_arrived_ptr,
    shared_partial_ptr, shared_stats_ptr, kv_scales_ptr,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, head_stride, window, scale, cap, rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW_COST: tl.constexpr, COUNT: tl.constexpr,
    PACK: tl.constexpr, QUERIES: tl.constexpr, ITEM_COST: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    slice = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    M: tl.constexpr = max(GROUP_PAD, 16)
    group = tl.arange(0, M)
    dim = tl.arange(0, DIM_PAD)
    real = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    k_ptr += head * head_stride
    v_ptr += head * head_stride
    if kv_scales_ptr is not None:
        k_scale, v_scale = head_scales(kv_scales_ptr, head, KV_HEADS)
        scale *= k_scale
    wait_previous(PDL)
    quota = tl.load(quota_ptr)
    first_row = tl.load(slice_row_ptr + slice)
    last_row = tl.load(slice_row_ptr + slice + 1)
    next_tiles, next_item, rows_done = 0, -1, 0
    if PACK > 0:
        shared_quota = tl.load(shared_quota_ptr)
        if shared_quota > 0:
            next_tiles, next_item = shared_by(first_row, shared_ptr)
            attend_shared(
                slice, head, shared_quota, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, table_ptr, rows_ptr,
                item_first_ptr, order_ptr, items_ptr, slice_item_ptr, item_arrived_ptr,
                shared_partial_ptr, shared_stats_ptr, kv_scales_ptr,
                q_stride, q_head_stride, table_stride, block_stride, token_stride, scale, cap, rows,
                KV_HEADS, GROUP, PACK, QUERIES, DIM, DIM_PAD, TILE, BLOCK_SIZE, ITEM_COST, CAP, SINKS, LSE,
            )  # fmt: skip
    for row in range(first_row, last_row + 1):
        # All that depends on nothing but the row is asked for at once: each wait in turn costs as much as a tile.
        keys = tl.load(seq_lens_ptr + row)
        table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
        q_at = q_ptr + tl.cast(row, tl.int64) * q_stride + (head * GROUP + group)[:, None] * q_head_stride
        q = tl.load(q_at + dim[None, :], mask=real, other=0.0)
        q_scale = scale
        if kv_scales_ptr is not None:
            q, q_scale = queries_for_fp8(q, scale)
        begin, end, first_slice, slices = row_part(first_ptr, row, slice, quota, ROW_COST)
        skipped = first_tile(keys, window, TILE, WINDOW)
        item = next_item
        if PACK > 0:  # noqa: SIM102 (known when compiled; the other is not)
            # Windows and shared blocks exclude each other.
            if shared_quota > 0:
                skipped = next_tiles
                next_tiles, next_item = shared_by(tl.minimum(row + 1, last_row), shared_ptr)
        done = (begin < end) & (slices == 1)
        if begin < end:
            acc, top, total = attend(
                tl.zeros([M, DIM_PAD], tl.float32),
                tl.full([M], float("-inf"), tl.float32),
                tl.zeros([M], tl.float32),
                q, tl.full([M], 0, tl.int32) + keys - 1, k_ptr, v_ptr, table,
                (skipped + begin) * TILE, tl.minimum((skipped + end) * TILE, keys), keys, block_stride, token_stride,
                window, q_scale, cap, DIM, DIM_PAD, TILE, BLOCK_SIZE, True, WINDOW, CAP,
            )  # fmt: skip
            if kv_scales_ptr is not None:
                acc *= v_scale
            if done:
                _row_done(
                    acc, top, total, out_ptr, lse_ptr, sinks_ptr, shared_partial_ptr, shared_stats_ptr,
                    row, head, group, skipped, KV_HEADS, GROUP, DIM, DIM_PAD, PACK, SINKS, LSE,
                )  # fmt: skip
            else:
                done = leave_part(
                    acc, top, total, partial_ptr, stats_ptr, arrived_ptr, slice, first_slice, slices, head, group,
                    KV_HEADS, GROUP, DIM_PAD,
                )  # fmt: skip
                if done:
                    row_acc, row_top, row_total = combine(
                        partial_ptr, stats_ptr, first_slice, slices, head, KV_HEADS, GROUP, GROUP_PAD, DIM_PAD, COUNT
                    )
                    _row_done(
                        row_acc, row_top, row_total, out_ptr, lse_ptr, sinks_ptr, shared_partial_ptr, shared_stats_ptr,
                        row, head, tl.arange(0, GROUP_PAD), skipped, KV_HEADS, GROUP, DIM, DIM_PAD, PACK, SINKS, LSE,
                    )  # fmt: skip
        if PACK > 0:
            # Rows of an item often follow each other. They arrive together: publishing takes as long as a tile.
            rows_done += (done & (skipped > 0)).to(tl.int32)
            if (rows_done > 0) & ((row == last_row) | (next_item != item)):
                arrive(
                    item, head, rows_done, out_ptr, lse_ptr, sinks_ptr, order_ptr, items_ptr, item_arrived_ptr,
                    shared_partial_ptr, shared_stats_ptr, rows,
                    KV_HEADS, GROUP, PACK, QUERIES, DIM, DIM_PAD, SINKS, LSE,
                )  # fmt: skip
                rows_done = 0


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    metadata: AttentionMetadata,
    window: int | None,
    sinks: Tensor | None,
    kv_scales: Tensor | None,
    scales: dict[str, Any],
    constants: dict[str, int],
) -> None:
    """Write `out` and `lse` for the first `num_decodes` tokens; `scales` and `constants` as `tile.py` makes them.

    Other arguments as the op's; strides of both caches are the same.
    """
    kv_heads, group, dim_pad = k_cache.shape[-2], constants["GROUP"], constants["DIM_PAD"]
    group_pad = triton.next_power_of_2(group)
    pack = rows_per_item(q, metadata, window, constants)
    plan = decode_plan(metadata, kv_heads, group, dim_pad, constants["TILE"], window, constants["BLOCK_SIZE"], pack)
    shared = plan.shared
    # Without one nothing of it is looked at.
    of_shared = (plan.first,) * 7 + (plan.partial, plan.stats)
    if shared is not None:
        of_shared = (
            shared.rows, shared.item_first, shared.order, shared.items, shared.slice_item, shared.quota, shared.arrived,
            shared.partial, shared.stats,
        )  # fmt: skip
    _decode_kernel[(plan.slices * kv_heads,)](
        q, k_cache, v_cache, out, lse if lse is not None else out, sinks if sinks is not None else q,
        metadata.block_table, metadata.rows, metadata.seq_lens,
        plan.first, plan.slice_row, plan.quota, plan.arrived, plan.partial, plan.stats, *of_shared, kv_scales,
        q.stride(0), q.stride(1), metadata.block_table.stride(0), *k_cache.stride()[:3], window or 0,
        rows=metadata.num_decodes, KV_HEADS=kv_heads, GROUP_PAD=group_pad, ROW_COST=plan.row_cost,
        COUNT=max(COMBINED_AT_ONCE // (group_pad * dim_pad), 1),
        PACK=pack, QUERIES=queries_per_item(q), ITEM_COST=groups.ITEM_COST,
        WINDOW=window is not None, SINKS=sinks is not None, LSE=lse is not None,
        num_warps=WARPS, num_stages=STAGES, **scales, **constants, **options(q),
    )  # fmt: skip
