"""MLA of rows with several tokens to earlier ones: a program per tile of tokens and block of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention.prefill_plan import ENTRY, prefill_plan
from rapid_infer.ops.providers.triton.attention.tile import finish
from rapid_infer.ops.providers.triton.kv_values import queries_for_fp8
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.mla.tile import attend_latent, check_strides, load_query, mla_shape, read_views

QUERIES = 64
"""Query heads of a tile, all its tokens together: their results stay in registers."""
FP32_QUERIES = 16
WARPS = 8
STAGES = 2


@triton.jit(do_not_specialize=["table_ptr", "table_stride"])
def _context_kernel(
    q_ptr, cache_ptr, rope_ptr, scales_ptr, out_ptr, lse_ptr, table_ptr, plan_ptr,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, scale,
    HEAD_BLOCKS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    # One axis, since others end at 65,535 programs, and a tile may be one token.
    block = tl.program_id(0) % HEAD_BLOCKS
    plan_ptr += tl.program_id(0) // HEAD_BLOCKS * ENTRY
    wait_previous(PDL)
    tokens = tl.load(plan_ptr + 1)
    if tokens <= 0:
        return
    first = tl.load(plan_ptr)
    context = tl.load(plan_ptr + 2) - tl.load(plan_ptr + 5)
    table = table_ptr + tl.load(plan_ptr + 4).to(tl.int64) * table_stride
    nth = tl.arange(0, M)
    head = block * GROUP + nth % GROUP
    exists = (nth < TOKENS * GROUP) & (nth // GROUP < tokens)
    at = (first + nth // GROUP).to(tl.int64)
    if context <= 0:
        nothing = tl.full([M], float("-inf"), tl.float32)
        tl.store(lse_ptr + at * (HEAD_BLOCKS * GROUP) + head, nothing, mask=exists)
        return
    q_latent, q_rope = load_query(
        q_ptr, at * q_stride + head * q_head_stride, exists, RANK, RANK_PAD, ROPE, ROPE_PAD
    )  # fmt: skip
    q_scale = 1.0
    if scales_ptr is not None:
        q_latent, q_scale = queries_for_fp8(q_latent, q_scale)
    full = context // TILE * TILE
    position = tl.full([M], 0, tl.int32) + context - 1
    acc = tl.zeros([M, RANK_PAD], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc, top, total = attend_latent(
        acc, top, total, q_latent, q_rope, q_scale, position, cache_ptr, rope_ptr, scales_ptr, table,
        full * 0, full, context, block_stride, token_stride, scale,
        RANK, RANK_PAD, ROPE, ROPE_PAD, TILE, BLOCK_SIZE, False,
    )  # fmt: skip
    acc, top, total = attend_latent(
        acc, top, total, q_latent, q_rope, q_scale, position, cache_ptr, rope_ptr, scales_ptr, table,
        full, context, context, block_stride, token_stride, scale,
        RANK, RANK_PAD, ROPE, ROPE_PAD, TILE, BLOCK_SIZE, True,
    )  # fmt: skip
    out, lse = finish(acc, top, total, q_ptr, head, exists, False)
    index = tl.arange(0, RANK_PAD)
    to = (at * (HEAD_BLOCKS * GROUP) + head)[:, None] * RANK + index[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (index < RANK)[None, :])
    tl.store(lse_ptr + at * (HEAD_BLOCKS * GROUP) + head, lse, mask=exists)


def mla_context(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int, out: Tensor, lse: Tensor
) -> None:
    """Reads no tensor on the host; a program whose row has no context ends at once."""
    q = check_strides(q, cache)
    most = FP32_QUERIES if q.element_size() > 2 else QUERIES
    shape = mla_shape(q, cache, scale, rank, most)
    per_tile = max(most // shape.group, 1)
    plan = prefill_plan(metadata, q.shape[0], per_tile)
    _context_kernel[(plan.shape[0] * shape.head_blocks,)](
        q, *read_views(q, cache, rank), out, lse, metadata.block_table, plan,
        q.stride(0), q.stride(1), metadata.block_table.stride(0), cache.stride(0), cache.stride(1),
        HEAD_BLOCKS=shape.head_blocks, GROUP=shape.group, TOKENS=per_tile,
        M=max(triton.next_power_of_2(per_tile * shape.group), 16),
        num_warps=WARPS, num_stages=STAGES, **shape.constants, **options(q),
    )  # fmt: skip
