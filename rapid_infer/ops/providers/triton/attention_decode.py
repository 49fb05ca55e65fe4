"""Attention of rows with one token: a program per slice of the work (see attention_plan) and kv head.

All query heads that share a kv head go together, padded to what a tensor core takes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton import attention_shared
from rapid_infer.ops.providers.triton.attention_plan import decode_plan, first_tile, row_part
from rapid_infer.ops.providers.triton.attention_shared import (
    add_shared,
    attend_shared,
    load_first,
    rows_per_item,
)
from rapid_infer.ops.providers.triton.attention_tile import add_parts, attend, finish
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

WARPS = 4
STAGES = 3
COMBINED_AT_ONCE = 8192
"""Elements of partial results that a program reads at once."""


@triton.jit
def write_row(
    acc, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, group,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """The row's result for the `group` `[M]` of query heads of a kv head."""
    exists = group < GROUP
    query_head = head * GROUP + group
    out, lse = finish(acc, top, total, sinks_ptr, query_head, exists, SINKS)
    dim = tl.arange(0, DIM_PAD)
    at = row * (KV_HEADS * GROUP) + query_head
    mask = exists[:, None] & (dim < DIM)[None, :]
    tl.store(out_ptr + at[:, None] * DIM + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        tl.store(lse_ptr + at, lse, mask=exists)


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


@triton.jit(do_not_specialize=["table_ptr", "rows_ptr", "seq_lens_ptr"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, table_ptr, rows_ptr, seq_lens_ptr,
    first_ptr, slice_row_ptr, quota_ptr, arrived_ptr, partial_ptr, stats_ptr,
    shared_ptr, shared_partial_ptr, shared_stats_ptr,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, head_stride, window, scale, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW_COST: tl.constexpr, COUNT: tl.constexpr,
    PACK: tl.constexpr, ADD_COUNT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    slice = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    M: tl.constexpr = max(GROUP_PAD, 16)
    group = tl.arange(0, M)
    dim = tl.arange(0, DIM_PAD)
    real = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    wait_previous(PDL)
    quota = tl.load(quota_ptr)
    first_row = tl.load(slice_row_ptr + slice)
    last_row = tl.load(slice_row_ptr + slice + 1)
    for row in range(first_row, last_row + 1):
        # All that depends on nothing but the row is asked for at once: each wait in turn costs as much as a tile.
        keys = tl.load(seq_lens_ptr + row)
        table = table_ptr + tl.load(rows_ptr + row) * table_stride
        q_at = q_ptr + row * q_stride + (head * GROUP + group)[:, None] * q_head_stride
        q = tl.load(q_at + dim[None, :], mask=real, other=0.0)
        begin, end, first_slice, slices = row_part(first_ptr, row, slice, quota, ROW_COST)
        skipped = first_tile(keys, window, TILE, WINDOW)
        if PACK > 0:
            # Windows and shared blocks exclude each other.
            skipped = tl.load(shared_ptr + row * 3)
            shared_slice = tl.load(shared_ptr + row * 3 + 1)
            shared_slices = tl.load(shared_ptr + row * 3 + 2)
        if begin < end:
            if PACK > 0:
                takes = (skipped > 0) & (slice == first_slice)
                part, part_top, part_total = load_first(
                    takes, shared_slice, shared_partial_ptr, shared_stats_ptr, row, head,
                    KV_HEADS, GROUP, GROUP_PAD, DIM_PAD, PACK,
                )  # fmt: skip
            acc, top, total = attend(
                tl.zeros([M, DIM_PAD], tl.float32),
                tl.full([M], float("-inf"), tl.float32),
                tl.zeros([M], tl.float32),
                q, tl.full([M], 0, tl.int32) + keys - 1,
                k_ptr + head * head_stride, v_ptr + head * head_stride, table,
                (skipped + begin) * TILE, tl.minimum((skipped + end) * TILE, keys), keys, block_stride, token_stride,
                window, scale, cap, DIM, DIM_PAD, TILE, BLOCK_SIZE, True, WINDOW, CAP,
            )  # fmt: skip
            if PACK > 0:  # noqa: SIM102 (known when compiled; the other is not)
                if takes:
                    acc, top, total = add_shared(
                        acc, top, total, part, part_top, part_total, shared_slice, shared_slices,
                        shared_partial_ptr, shared_stats_ptr, row, head, group,
                        KV_HEADS, GROUP, GROUP_PAD, DIM_PAD, PACK, ADD_COUNT,
                    )  # fmt: skip
            if slices == 1:
                write_row(
                    acc, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, group,
                    KV_HEADS, GROUP, DIM, DIM_PAD, SINKS, LSE,
                )  # fmt: skip
            else:
                place = (slice * 2 + (slice == first_slice).to(tl.int32)) * KV_HEADS + head
                at = place * GROUP + group
                tl.store(
                    partial_ptr + at[:, None] * DIM_PAD + dim[None, :], acc, mask=(group < GROUP)[:, None]
                )  # fmt: skip
                stats = stats_ptr + place * (2 * GROUP) + group
                tl.store(stats, top, mask=group < GROUP)
                tl.store(stats + GROUP, total, mask=group < GROUP)
                # All threads' results before the one that counts, which publishes them.
                tl.debug_barrier()
                arrived = arrived_ptr + first_slice * KV_HEADS + head
                if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == slices - 1:
                    tl.store(arrived, 0)
                    row_acc, row_top, row_total = combine(
                        partial_ptr, stats_ptr, first_slice, slices, head, KV_HEADS, GROUP, GROUP_PAD, DIM_PAD, COUNT
                    )
                    write_row(
                        row_acc, row_top, row_total, out_ptr, lse_ptr, sinks_ptr, row, head, tl.arange(0, GROUP_PAD),
                        KV_HEADS, GROUP, DIM, DIM_PAD, SINKS, LSE,
                    )  # fmt: skip


def decode(
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
    """Write `out` and `lse` for the first `num_decodes` tokens; `scales` and `constants` as attention_tile makes them.

    Other arguments as the op's; strides of both caches are the same.
    """
    kv_heads, group, dim_pad = k_cache.shape[-2], constants["GROUP"], constants["DIM_PAD"]
    group_pad = triton.next_power_of_2(group)
    pack = rows_per_item(q, metadata, window, constants)
    plan = decode_plan(metadata, kv_heads, group, dim_pad, constants["TILE"], window, constants["BLOCK_SIZE"], pack)
    shared = plan.shared
    if shared is not None:
        attend_shared(q, k_cache, v_cache, metadata, shared, scales, constants)
    _decode_kernel[(plan.slices * kv_heads,)](
        q, k_cache, v_cache, out, lse if lse is not None else out, sinks if sinks is not None else q,
        metadata.block_table, metadata.rows, metadata.seq_lens,
        plan.first, plan.slice_row, plan.quota, plan.arrived, plan.partial, plan.stats,
        *((plan.first, plan.partial, plan.stats) if shared is None else (shared.rows, shared.partial, shared.stats)),
        q.stride(0), q.stride(1), metadata.block_table.stride(0), *k_cache.stride()[:3], window or 0,
        KV_HEADS=kv_heads, GROUP_PAD=group_pad, ROW_COST=plan.row_cost,
        COUNT=max(COMBINED_AT_ONCE // (group_pad * dim_pad), 1),
        PACK=pack, ADD_COUNT=max(attention_shared.ADDED_AT_ONCE // (max(group_pad, 16) * dim_pad), 1),
        WINDOW=window is not None, SINKS=sinks is not None, LSE=lse is not None,
        num_warps=WARPS, num_stages=STAGES, **scales, **constants, **options(q),
    )  # fmt: skip
