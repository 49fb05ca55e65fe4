"""Decode attention of what rows share: items of rows that read the same blocks together (see `groups.py`).

Programs of the decode kernel do a share of it before the rows' own keys. The last to be done with anything of an item,
its shared tiles or a row's own keys, puts the item's results together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention import groups
from rapid_infer.ops.providers.triton.attention.plan import row_part
from rapid_infer.ops.providers.triton.attention.tile import attend, load_part, merge, store_part, write_row
from rapid_infer.ops.providers.triton.kv_values import queries_for_fp8

SHARING = True
"""For measurements: False makes every row read all its keys."""
QUERIES = 64
"""Query heads of an item, all its rows together."""
FP32_QUERIES = 16
"""Exact products are made without tensor cores, from registers, where more would not fit."""


def rows_per_item(q: Tensor, metadata: AttentionMetadata, window: int | None, constants: dict[str, int]) -> int:
    """How many rows read shared blocks together; 0 where none may: by shapes and bounds, never by lengths."""
    rows, group, block_size = metadata.num_decodes, constants["GROUP"], constants["BLOCK_SIZE"]
    possible = metadata.max_seq_len > groups.MIN_BLOCKS * block_size
    whole = block_size % constants["TILE"] == 0
    if not (SHARING and 2 <= rows <= groups.MAX_ROWS and window is None and possible and whole):
        return 0
    rows_of_item = queries_per_item(q) // group
    return rows_of_item if rows_of_item >= 2 else 0


def queries_per_item(q: Tensor) -> int:
    return FP32_QUERIES if q.dtype == torch.float32 else QUERIES


@triton.jit
def shared_by(row, shared_ptr):
    """(tiles that a row shares, its item; -1 without any)."""
    tiles = tl.load(shared_ptr + row * 2)
    return tiles, tl.where(tiles > 0, tl.load(shared_ptr + row * 2 + 1), -1)


@triton.jit
def attend_shared(
    slice, head, quota, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, table_ptr, rows_ptr,
    item_first_ptr, order_ptr, items_ptr, slice_item_ptr, arrived_ptr, partial_ptr, stats_ptr, kv_scales_ptr,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, scale, cap, rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ITEM_COST: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """A slice of the items, for one kv head, at whose keys and values `k_ptr` and `v_ptr` point.

    `scale` has the head's scale of keys already.
    """
    index = tl.arange(0, M)
    nth = index // GROUP
    group = index % GROUP
    dim = tl.arange(0, DIM_PAD)
    for item in range(tl.load(slice_item_ptr + slice), tl.load(slice_item_ptr + slice + 1) + 1):
        begin, end, _, _ = row_part(item_first_ptr, item, slice, quota, ITEM_COST)
        if begin < end:
            first = tl.load(items_ptr + item * 4)
            exists = nth < tl.load(items_ptr + item * 4 + 1)
            row = tl.load(order_ptr + first + nth, mask=exists, other=0)
            # All its rows have the same blocks here.
            table = table_ptr + tl.load(rows_ptr + tl.load(order_ptr + first)).to(tl.int64) * table_stride
            q_at = q_ptr + (row * q_stride + (head * GROUP + group) * q_head_stride)[:, None]
            q = tl.load(q_at + dim[None, :], mask=exists[:, None] & (dim < DIM)[None, :], other=0.0)
            q_scale = scale
            if kv_scales_ptr is not None:
                q, q_scale = queries_for_fp8(q, scale)
            acc, top, total = attend(
                tl.zeros([M, DIM_PAD], tl.float32),
                tl.full([M], float("-inf"), tl.float32),
                tl.zeros([M], tl.float32),
                q, index, k_ptr, v_ptr, table, begin * TILE, end * TILE, end * TILE, block_stride, token_stride,
                0, q_scale, cap, DIM, DIM_PAD, TILE, BLOCK_SIZE, False, False, CAP,
            )  # fmt: skip
            if kv_scales_ptr is not None:
                acc *= tl.load(kv_scales_ptr + KV_HEADS + head)
            place = (rows + first + nth + slice * PACK) * KV_HEADS + head
            store_part(acc, top, total, partial_ptr, stats_ptr, place, group, exists, GROUP, DIM_PAD)
            arrive(
                item, head, 1, out_ptr, lse_ptr, sinks_ptr, order_ptr, items_ptr, arrived_ptr,
                partial_ptr, stats_ptr, rows,
                KV_HEADS, GROUP, PACK, M, DIM, DIM_PAD, SINKS, LSE,
            )  # fmt: skip


@triton.jit
def arrive(
    item, head, parts, out_ptr, lse_ptr, sinks_ptr, order_ptr, items_ptr, arrived_ptr, partial_ptr, stats_ptr, rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """`parts` of an item are done, slices of it or its rows' own keys. With the last one its results are written.

    Always added up in the same order: own keys first, then slices.
    """
    count = tl.load(items_ptr + item * 4 + 1)
    slices = tl.load(items_ptr + item * 4 + 3)
    # All threads' results before the one that counts, which publishes them.
    tl.debug_barrier()
    arrived = arrived_ptr + item * KV_HEADS + head
    if tl.atomic_add(arrived, parts, sem="acq_rel", scope="gpu") == count + slices - parts:
        tl.store(arrived, 0)
        index = tl.arange(0, M)
        nth = index // GROUP
        exists = nth < count
        group = tl.where(exists, index % GROUP, GROUP)
        first = tl.load(items_ptr + item * 4) + nth
        row = tl.load(order_ptr + first, mask=exists, other=0)
        first_slice = tl.load(items_ptr + item * 4 + 2)
        acc, top, total = load_part(partial_ptr, stats_ptr, row * KV_HEADS + head, group, exists, GROUP, DIM_PAD)
        for slice in range(first_slice, first_slice + slices):
            place = (rows + first + slice * PACK) * KV_HEADS + head
            part, part_top, part_total = load_part(partial_ptr, stats_ptr, place, group, exists, GROUP, DIM_PAD)
            acc, top, total = merge(acc, top, total, part, part_top, part_total)
        write_row(
            acc, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, group,
            KV_HEADS, GROUP, DIM, DIM_PAD, SINKS, LSE,
        )  # fmt: skip
