"""MLA of rows with one token: a program per block of heads and slice of `attention/plan.py`.

All heads share the keys, so they go together as the rows of one matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention.decode import combine, leave_part
from rapid_infer.ops.providers.triton.attention.plan import decode_plan, row_part
from rapid_infer.ops.providers.triton.attention.tile import write_row
from rapid_infer.ops.providers.triton.kv_values import queries_for_fp8
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.mla.tile import attend_latent, check_strides, load_query, mla_shape, read_views

MOST_HEADS = 64
"""In a program: their results stay in registers."""
FP32_HEADS = 16
FEW_WARPS, WARPS = 4, 8
"""Up to 16 heads, and more."""
STAGES = 3
PART_COST = 1
"""Of `decode_plan`: a part is a whole latent of every head in the program, about as many bytes as a tile of keys."""
COMBINED_AT_ONCE = 16384
"""Elements of partial results that a program reads at once."""


@triton.jit(do_not_specialize=["table_ptr", "rows_ptr", "seq_lens_ptr"])
def _decode_kernel(
    q_ptr, cache_ptr, rope_ptr, scales_ptr, out_ptr, table_ptr, rows_ptr, seq_lens_ptr,
    first_ptr, slice_row_ptr, quota_ptr, arrived_ptr, partial_ptr, stats_ptr,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, scale,
    HEAD_BLOCKS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW_COST: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    slice = tl.program_id(0) // HEAD_BLOCKS
    block = tl.program_id(0) % HEAD_BLOCKS
    M: tl.constexpr = max(GROUP_PAD, 16)
    group = tl.arange(0, M)
    wait_previous(PDL)
    quota = tl.load(quota_ptr)
    first_row = tl.load(slice_row_ptr + slice)
    last_row = tl.load(slice_row_ptr + slice + 1)
    for row in range(first_row, last_row + 1):
        keys = tl.load(seq_lens_ptr + row)
        table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
        # 29,128 rows of 128 heads have more features than 32 bits count.
        q_row = q_ptr + tl.cast(row, tl.int64) * q_stride
        at = (block * GROUP + group) * q_head_stride
        q_latent, q_rope = load_query(q_row, at, group < GROUP, RANK, RANK_PAD, ROPE, ROPE_PAD)
        q_scale = 1.0
        if scales_ptr is not None:
            q_latent, q_scale = queries_for_fp8(q_latent, q_scale)
        begin, end, first_slice, slices = row_part(first_ptr, row, slice, quota, ROW_COST)
        if begin < end:
            acc, top, total = attend_latent(
                tl.zeros([M, RANK_PAD], tl.float32),
                tl.full([M], float("-inf"), tl.float32),
                tl.zeros([M], tl.float32),
                q_latent, q_rope, q_scale, tl.full([M], 0, tl.int32) + keys - 1, cache_ptr, rope_ptr, scales_ptr, table,
                begin * TILE, tl.minimum(end * TILE, keys), keys, block_stride, token_stride, scale,
                RANK, RANK_PAD, ROPE, ROPE_PAD, TILE, BLOCK_SIZE, True,
            )  # fmt: skip
            if slices == 1:
                write_row(
                    acc, top, total, out_ptr, out_ptr, q_ptr, row, block, group,
                    HEAD_BLOCKS, GROUP, RANK, RANK_PAD, False, False,
                )  # fmt: skip
            else:
                last = leave_part(
                    acc, top, total, partial_ptr, stats_ptr, arrived_ptr, slice, first_slice, slices, block, group,
                    HEAD_BLOCKS, GROUP, RANK_PAD,
                )  # fmt: skip
                if last:
                    row_acc, row_top, row_total = combine(
                        partial_ptr, stats_ptr, first_slice, slices, block,
                        HEAD_BLOCKS, GROUP, GROUP_PAD, RANK_PAD, COUNT,
                    )  # fmt: skip
                    write_row(
                        row_acc, row_top, row_total, out_ptr, out_ptr, q_ptr, row, block, tl.arange(0, GROUP_PAD),
                        HEAD_BLOCKS, GROUP, RANK, RANK_PAD, False, False,
                    )  # fmt: skip


def mla_decode(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int, out: Tensor) -> None:
    """Reads no tensor on the host, so it can be captured in a CUDA graph; a token without keys gets zeros."""
    if not metadata.num_decodes:
        return
    q = check_strides(q, cache)
    shape = mla_shape(q, cache, scale, rank, FP32_HEADS if q.element_size() > 2 else MOST_HEADS)
    group_pad, rank_pad = triton.next_power_of_2(shape.group), shape.constants["RANK_PAD"]
    tile = shape.constants["TILE"]
    plan = decode_plan(metadata, shape.head_blocks, shape.group, rank_pad, tile, None, part_cost=PART_COST)
    _decode_kernel[(plan.slices * shape.head_blocks,)](
        q, *read_views(q, cache, rank), out,
        metadata.block_table, metadata.rows, metadata.seq_lens,
        plan.first, plan.slice_row, plan.quota, plan.arrived, plan.partial, plan.stats,
        q.stride(0), q.stride(1), metadata.block_table.stride(0), cache.stride(0), cache.stride(1),
        HEAD_BLOCKS=shape.head_blocks, GROUP=shape.group, GROUP_PAD=group_pad, ROW_COST=plan.row_cost,
        COUNT=max(COMBINED_AT_ONCE // (group_pad * rank_pad), 1),
        num_warps=FEW_WARPS if group_pad <= 16 else WARPS, num_stages=STAGES, **shape.constants, **options(q),
    )  # fmt: skip
