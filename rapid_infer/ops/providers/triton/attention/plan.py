"""How a step's decode rows are cut into equal shares of work: once per step, on the device.

Work is counted in tiles of keys, without those that rows share (see `groups.py`). The tiles of all rows stand in one
line, those of a row after ROW_COST more units for what a row costs besides. The line is cut into slices of equal
length, and one program per slice and kv head works through its slice, so that programs finish together however lengths
are mixed, and those that run side by side read neighbouring heads of the same pages. A row that lies in several slices
leaves partial results, which the program that comes last to it puts together.

Sizes and launches follow from numbers known on the host, not from lengths: a plan can be made in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention import groups
from rapid_infer.ops.providers.triton.attention.groups import (
    SharedPlan,
    empty_shared_plan,
    find_groups,
    padded_rows,
    plan_items,
)
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options, start_next, wait_previous

PROGRAMS_PER_MULTIPROCESSOR = 2
ROW_COST = 1
"""Starting a row, in tiles."""
MIN_QUOTA = 1
"""Units of a slice at least: below, more programs gain less than putting their results together costs."""
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class DecodePlan:
    """Of R rows in S slices.

    first      `[R + 1]` int32: the unit at which each row starts; the last is the number of units
    slice_row  `[S + 1]` int32: the row of each slice's first unit; the slice's rows end with the next slice's first
    quota      `[1]` int32: units per slice
    arrived    `[S, kv_heads]` int32 zeros: slices done of the row that runs on from slice s; left as zeros
    partial    `[S, 2, kv_heads, group, dim]` fp32, dim padded: unscaled results of a slice's part of the row that runs
               into it, and of the one that starts in it and runs on
    stats      `[S, 2, kv_heads, 2, group]` fp32: their highest score and sum of weights
    shared     what rows share, if any may
    """

    slices: int
    row_cost: int
    first: Tensor
    slice_row: Tensor
    quota: Tensor
    arrived: Tensor
    partial: Tensor
    stats: Tensor
    shared: SharedPlan | None = None


@triton.jit
def first_tile(keys, window, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The tile with the first of `keys` that the last position sees."""
    if WINDOW:
        return tl.maximum(keys - window, 0) // TILE
    else:
        return keys * 0


@triton.jit
def row_part(first_ptr, row, slice, quota, ROW_COST: tl.constexpr):
    """(begin, end, first slice, slices): the tiles of a row, its first 0, that lie in a slice; none if begin >= end.

    And which slices hold the row.
    """
    row_begin = tl.load(first_ptr + row) + ROW_COST
    row_end = tl.load(first_ptr + row + 1)
    begin = tl.maximum(row_begin, slice * quota)
    end = tl.minimum(row_end, (slice + 1) * quota)
    first_slice = row_begin // quota
    return begin - row_begin, end - row_begin, first_slice, (row_end - 1) // quota - first_slice + 1


@triton.jit
def _units(seq_lens_ptr, row, rows, shared, window, TILE: tl.constexpr, ROW_COST: tl.constexpr, WINDOW: tl.constexpr):
    """Of each row, without `shared` tiles; one without keys, a padding row, has a tile: its output is to be written."""
    keys = tl.load(seq_lens_ptr + row, mask=row < rows, other=0)
    tiles = (keys + TILE - 1) // TILE - first_tile(keys, window, TILE, WINDOW) - shared
    return tl.where(row < rows, tl.maximum(tiles, 1) + ROW_COST, 0)


@triton.jit(do_not_specialize=["seq_lens_ptr", "decodes_ptr", "counted", "table_ptr", "rows_ptr", "rows"])
def _plan_kernel(
    seq_lens_ptr, decodes_ptr, counted, first_ptr, slice_row_ptr, quota_ptr, arrived_ptr,
    rows, slices, window, kv_heads,
    table_ptr, rows_ptr, table_stride, shared_ptr, item_first_ptr, order_ptr, items_ptr, slice_item_ptr,
    shared_quota_ptr, item_arrived_ptr,
    TILE: tl.constexpr, ROW_COST: tl.constexpr, MIN_QUOTA: tl.constexpr, PART_COST: tl.constexpr, WINDOW: tl.constexpr,
    HEADS_PAD: tl.constexpr, ROWS: tl.constexpr,
    PACK: tl.constexpr, BLOCK_SIZE: tl.constexpr, MIN_BLOCKS: tl.constexpr, MIN_SAVED: tl.constexpr,
    COLUMNS: tl.constexpr, ITEM_COST: tl.constexpr, MIN_SHARED_QUOTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every program adds up all rows, to find the first of its own slice without waiting for another."""
    start_next(PDL)
    wait_previous(PDL)
    slice = tl.program_id(0)
    # Not two kernels: this one takes seconds to compile.
    decodes = tl.load(decodes_ptr, mask=counted > 0, other=rows)
    shared = 0
    if PACK > 0:
        # All rows are at once in this case.
        shared, order, tiles, start, end = find_groups(
            seq_lens_ptr, table_ptr, rows_ptr, table_stride, shared_ptr, rows, decodes,
            TILE, BLOCK_SIZE, MIN_BLOCKS, MIN_SAVED, ROWS, COLUMNS,
        )  # fmt: skip
        plan_items(
            shared, order, tiles, start, end,
            shared_ptr, item_first_ptr, order_ptr, items_ptr, slice_item_ptr, shared_quota_ptr, item_arrived_ptr,
            rows, slice, slices, kv_heads, PACK, ITEM_COST, MIN_SHARED_QUOTA, ROWS, HEADS_PAD,
        )  # fmt: skip
    total = 0
    longest = 0
    for at in range(0, rows, ROWS):
        row = at + tl.arange(0, ROWS)
        units = _units(seq_lens_ptr, row, decodes, shared, window, TILE, ROW_COST, WINDOW)
        total += tl.sum(units)
        longest = tl.maximum(longest, tl.max(units))
    quota = tl.maximum((total + slices - 1) // slices, MIN_QUOTA)
    if PART_COST > 0:
        # A row of n tiles in slices of q takes as long as q + n / q * PART_COST of them: least at the root.
        quota = tl.maximum(quota, tl.sqrt((longest * PART_COST).to(tl.float32)).to(tl.int32))
    before = 0
    starting = 0
    for at in range(0, rows, ROWS):
        row = at + tl.arange(0, ROWS)
        units = _units(seq_lens_ptr, row, decodes, shared, window, TILE, ROW_COST, WINDOW)
        begin = before + tl.cumsum(units) - units
        starting += tl.sum(((begin <= slice * quota) & (row < decodes)).to(tl.int32))
        before += tl.sum(units)
        if slice == 0:
            tl.store(first_ptr + row, begin, mask=row < rows)
    # Without decode rows the first row, which has no units, stands for them.
    tl.store(slice_row_ptr + slice, tl.maximum(starting - 1, 0), mask=slice <= slices)
    if slice == 0:
        tl.store(first_ptr + rows, total)
        tl.store(quota_ptr, quota)
    head = tl.arange(0, HEADS_PAD)
    exists = (head < kv_heads) & (slice <= slices)
    tl.store(arrived_ptr + slice * kv_heads + head, tl.zeros([HEADS_PAD], tl.int32), mask=exists)


def decode_plan(
    metadata: AttentionMetadata,
    kv_heads: int,
    group: int,
    dim_pad: int,
    tile: int,
    window: int | None,
    block_size: int = 0,
    pack: int = 0,
    part_cost: int = 0,
) -> DecodePlan:
    """The step's plan for layers of this shape, made by the first of them.

    Up to `pack` rows read blocks that they share together; 0 if none may. `part_cost`: what putting the result of one
    more slice of a row together costs, in tiles; 0 where it is little.
    """
    key = ("triton decode", kv_heads, group, dim_pad, tile, window, pack, part_cost)
    plan = metadata.plans.get(key)
    if plan is not None:
        return plan
    rows, device = metadata.num_decodes, metadata.seq_lens.device
    slices = max(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // kv_heads, 1)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    plan = metadata.plans[key] = DecodePlan(
        slices=slices,
        row_cost=ROW_COST,
        first=empty(rows + 1),
        slice_row=empty(slices + 1),
        quota=empty(1),
        # One more, for the program that only looks up where the last slice ends.
        arrived=empty(slices + 1, kv_heads),
        partial=empty(slices, 2, kv_heads, group, dim_pad, dtype=torch.float32),
        stats=empty(slices, 2, kv_heads, 2, group, dtype=torch.float32),
        shared=empty_shared_plan(rows, slices, kv_heads, group, dim_pad, pack, device) if pack else None,
    )
    shared = plan.shared
    at_once = _ROWS_AT_ONCE if shared is None else padded_rows(rows)
    _plan_kernel[(slices + 1,)](
        metadata.seq_lens, metadata.seq_lens if metadata.decodes is None else metadata.decodes,
        int(metadata.decodes is not None), plan.first, plan.slice_row, plan.quota, plan.arrived,
        rows, slices, window or 0, kv_heads,
        metadata.block_table, metadata.rows, metadata.block_table.stride(0),
        *((plan.first,) * 7 if shared is None else
          (shared.rows, shared.item_first, shared.order, shared.items, shared.slice_item,
           shared.quota, shared.arrived)),
        TILE=tile, ROW_COST=ROW_COST, MIN_QUOTA=MIN_QUOTA, PART_COST=part_cost, WINDOW=window is not None,
        HEADS_PAD=triton.next_power_of_2(kv_heads), ROWS=at_once, PACK=pack, BLOCK_SIZE=block_size,
        MIN_BLOCKS=groups.MIN_BLOCKS, MIN_SAVED=groups.MIN_SAVED,
        COLUMNS=max(groups.COMPARED_AT_ONCE // at_once, 1), ITEM_COST=groups.ITEM_COST,
        MIN_SHARED_QUOTA=groups.MIN_QUOTA, num_warps=8 if pack else 4, **options(metadata.seq_lens),
    )  # fmt: skip
    return plan
