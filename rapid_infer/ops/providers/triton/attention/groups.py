"""Which decode rows share leading cache blocks, found on the device as part of the decode plan.

Prefix caching gives rows with the same prompt the same blocks, so rows share what their tables begin with. Rows are
sorted by one of their first blocks, which brings those together that may share, and neighbours are compared. A group is
a run of rows of which each shares blocks with the one before it; it shares as many as the least of these.

The shared tiles of all groups are work of its own. Up to PACK rows of a group are an item; items stand in one line,
which is cut into slices of equal length, as the rows of `plan.py` are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_BLOCKS = 4
"""Blocks of a group at least."""
MIN_SAVED = 64
"""Tiles that all groups together save at least, per kv head: fewer cost less than putting results together."""
ITEM_COST = 1
"""Starting an item and writing its results, in tiles."""
MIN_QUOTA = 4
"""Units of a slice at least: every slice of an item is one more result to add up for each of its rows."""
MAX_ROWS = 1024
"""What one program compares. Steps with more rows share nothing."""
COMPARED_AT_ONCE = 4096
"""Blocks."""

# Above any number of blocks; times MAX_ROWS within int32.
_FAR = tl.constexpr(1 << 20)
_NO_BLOCK = tl.constexpr(1 << 30)


@dataclass(frozen=True)
class SharedPlan:
    """What R rows in S slices share; `pack` rows are an item at most.

    rows        `[R, 2]` int32: tiles that the row shares; if any, its item
    item_first  `[R + 1]` int32: the unit at which each item starts; after the last item the number of units
    order       `[R]` int32: the rows as sorted; an item's rows stand side by side
    items       `[R, 4]` int32: place in `order` of the first row, number of rows, first slice and number of slices
    arrived     `[R, kv_heads]` int32 zeros for items: rows and slices of it that are done; left as zeros
    slice_item  `[S + 1]` int32: the item of each slice's first unit; the slice's items end with the next slice's first
    quota       `[1]` int32: units per slice; 0 if nothing is shared, and then only `rows` is valid besides
    partial     `[2 * R + S * pack, kv_heads, group, dim]` fp32, dim padded: unscaled results, of a row's own keys at
                row, of what it shares in slice s at R + place in `order` + s * pack. Items and slices follow each other
                in one line, so no two need the same place.
    stats       `[2 * R + S * pack, kv_heads, 2, group]` fp32: their highest score and sum of weights
    """

    slices: int
    pack: int
    rows: Tensor
    item_first: Tensor
    order: Tensor
    items: Tensor
    slice_item: Tensor
    quota: Tensor
    arrived: Tensor
    partial: Tensor
    stats: Tensor


def empty_shared_plan(
    rows: int, slices: int, kv_heads: int, group: int, dim_pad: int, pack: int, device: torch.device
) -> SharedPlan:
    """As the plan kernel fills it."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    places = 2 * rows + slices * pack
    return SharedPlan(
        slices=slices,
        pack=pack,
        rows=empty(rows, 2),
        item_first=empty(rows + 1),
        order=empty(rows),
        items=empty(rows, 4),
        slice_item=empty(slices + 1),
        quota=empty(1),
        arrived=empty(rows, kv_heads),
        partial=empty(places, kv_heads, group, dim_pad, dtype=torch.float32),
        stats=empty(places, kv_heads, 2, group, dtype=torch.float32),
    )


def padded_rows(rows: int) -> int:
    """Few sizes, since each is a kernel to compile."""
    return next((size for size in (32, 256) if rows <= size), MAX_ROWS)


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b)


@triton.jit
def _lower(a, b):
    return tl.minimum(a, b)


@triton.jit
def _leading_equal(table_ptr, own, previous, limit, linked, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`[ROWS]`: how many blocks from `own` on equal those from `previous` on, at most `limit`; 0 where not `linked`."""
    column = tl.arange(0, COLUMNS)
    equal = tl.zeros([ROWS], tl.int32)
    start = 0
    going = tl.max(linked.to(tl.int32), 0)
    while going > 0:
        at = start + column[None, :]
        inside = linked[:, None] & (at < limit[:, None])
        a = tl.load(table_ptr + own[:, None] + at, mask=inside, other=0)
        b = tl.load(table_ptr + previous[:, None] + at, mask=inside, other=0)
        # Block 0 is nobody's, and stands for all beyond the limit.
        differs = (a != b) | (a == 0)
        more = tl.min(tl.where(differs, column[None, :], COLUMNS), 1)
        equal += tl.where(linked, more, 0)
        linked = linked & (more == COLUMNS)
        start += COLUMNS
        going = tl.max(linked.to(tl.int32), 0)
    return equal


@triton.jit
def _runs(equal, MIN_BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """(blocks, first row, last row), each `[ROWS]`, of every row's group, by what each shares with the one before."""
    row = tl.arange(0, ROWS)
    next_row = tl.minimum(row + 1, ROWS - 1)
    equal = tl.where(equal < MIN_BLOCKS, 0, equal)
    near = tl.maximum(tl.gather(equal, tl.maximum(row - 1, 0), 0), tl.gather(equal, next_row, 0))
    # Groups with a little in common, such as a system prompt, stay apart: together they would share only that.
    equal = tl.where(2 * equal < near, 0, equal)
    starts = equal == 0
    ends = (tl.gather(starts.to(tl.int32), next_row, 0) > 0) | (row == ROWS - 1)
    start = tl.associative_scan(tl.where(starts, row, 0), 0, _higher)
    end = tl.associative_scan(tl.where(ends, row, ROWS), 0, _lower, reverse=True)
    # Each run lies below all before it, so that the least so far is always one of the same run.
    depth = tl.cumsum(starts.to(tl.int32), 0) * _FAR
    least = tl.associative_scan(tl.where(starts, _FAR, equal) - depth, 0, _lower)
    blocks = tl.where(end > start, tl.gather(least, end, 0) + depth, 0)
    return blocks, start, end


@triton.jit
def _sorted(value, place, ROWS: tl.constexpr):
    """(values, places), ascending by value and then by place."""
    both = tl.sort(value.to(tl.int64) * ROWS + place)
    place = both & (ROWS - 1)
    return ((both - place) // ROWS).to(tl.int32), place.to(tl.int32)


@triton.jit
def find_groups(
    seq_lens_ptr, table_ptr, rows_ptr, table_stride, shared_ptr, rows, decodes,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, MIN_BLOCKS: tl.constexpr, MIN_SAVED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(tiles that each row shares, order, tiles, first place, last place), each `[ROWS]`.

    `order` is the rows as sorted, and what follows is of the group at each place of it; no tiles without a group.
    """
    place = tl.arange(0, ROWS)
    real = place < decodes
    keys = tl.load(seq_lens_ptr + place, mask=real, other=0)
    own = tl.load(rows_ptr + place, mask=real, other=0) * table_stride
    # Not the block of the last key: it is written to, and every row keeps a tile to itself.
    limit = tl.maximum(keys - 1, 0) // BLOCK_SIZE
    # One block tells most rows apart. Block 0 is nobody's: a row without one is like no other, and stands behind.
    block = tl.load(table_ptr + own + (MIN_BLOCKS - 1), mask=real & (limit >= MIN_BLOCKS), other=0)
    block, order = _sorted(tl.where(block > 0, block, _NO_BLOCK + place), place, ROWS)
    before = tl.maximum(place - 1, 0)
    linked = (block < _NO_BLOCK) & (place > 0) & (tl.gather(block, before, 0) == block)
    own_tiles = tl.zeros([ROWS], tl.int32)
    tiles = own_tiles
    start = place
    end = place
    if tl.max(linked.to(tl.int32), 0) > 0:
        own = tl.gather(own, order, 0)
        limit = tl.gather(limit, order, 0)
        shared = tl.minimum(limit, tl.gather(limit, before, 0))
        equal = _leading_equal(table_ptr, own, tl.gather(own, before, 0), shared, linked, ROWS, COLUMNS)
        blocks, start, end = _runs(equal, MIN_BLOCKS, ROWS)
        tiles = blocks * (BLOCK_SIZE // TILE)
        saved = tl.sum(tl.where(place > start, tiles, 0), 0)
        tiles = tl.where(saved >= MIN_SAVED, tiles, 0)
        # Back into the order of rows through memory, where all programs write the same.
        tl.store(shared_ptr + order * 2, tiles, mask=order < rows)
        tl.debug_barrier()
        own_tiles = tl.load(shared_ptr + place * 2, mask=place < rows, other=0, cache_modifier=".cg")
    return own_tiles, order, tiles, start, end


@triton.jit
def plan_items(
    own_tiles, order, tiles, start, end,
    shared_ptr, item_first_ptr, order_ptr, items_ptr, slice_item_ptr, quota_ptr, arrived_ptr,
    rows, slice, slices, kv_heads,
    PACK: tl.constexpr, ITEM_COST: tl.constexpr, MIN_QUOTA: tl.constexpr, ROWS: tl.constexpr, HEADS_PAD: tl.constexpr,
):  # fmt: skip
    """Write the plan's part that is this slice's, and in slice 0 what is everybody's."""
    place = tl.arange(0, ROWS)
    quota = 0
    if tl.max(tiles, 0) > 0:
        leads = (tiles > 0) & ((place - start) % PACK == 0)
        units = tl.where(leads, tiles + ITEM_COST, 0)
        total = tl.sum(units, 0)
        quota = tl.maximum((total + slices - 1) // slices, MIN_QUOTA)
        begin = tl.cumsum(units, 0) - units
        starting = tl.sum((leads & (begin <= slice * quota)).to(tl.int32), 0)
        tl.store(slice_item_ptr + slice, starting - 1, mask=slice <= slices)
        if slice == 0:
            item = tl.cumsum(leads.to(tl.int32), 0) - 1
            tl.store(item_first_ptr + item, begin, mask=leads)
            tl.store(item_first_ptr + tl.sum(leads.to(tl.int32), 0), total)
            first_slice = (begin + ITEM_COST) // quota
            tl.store(items_ptr + item * 4, place, mask=leads)
            tl.store(items_ptr + item * 4 + 1, tl.minimum(end - place + 1, PACK), mask=leads)
            tl.store(items_ptr + item * 4 + 2, first_slice, mask=leads)
            tl.store(items_ptr + item * 4 + 3, (begin + units - 1) // quota - first_slice + 1, mask=leads)
            tl.store(order_ptr + place, order, mask=place < rows)
            tl.store(shared_ptr + order * 2 + 1, item, mask=tiles > 0)
            head = tl.arange(0, HEADS_PAD)
            zeros = tl.zeros([ROWS, HEADS_PAD], tl.int32)
            at = arrived_ptr + item[:, None] * kv_heads + head[None, :]
            tl.store(at, zeros, mask=leads[:, None] & (head < kv_heads)[None, :])
    if slice == 0:
        tl.store(quota_ptr, quota)
        tl.store(shared_ptr + place * 2, own_tiles, mask=place < rows)
