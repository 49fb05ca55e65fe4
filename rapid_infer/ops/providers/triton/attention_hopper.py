"""Attention of rows with several tokens for SM 90 alone, in Gluon: warps that copy, and two warpgroups that compute.

Triton waits for each product before it goes on. Here a warpgroup weighs one tile of keys while the tensor cores make
the scores of the next, and the two warpgroups run free of each other.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_LOG2E = gl.constexpr(math.log2(math.e))
_LN2 = gl.constexpr(math.log(2))
ROWS = gl.constexpr(64)
"""Query heads of a warpgroup."""


@gluon.jit
def _grid_wait(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _span(first_position, tokens, window, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """(first tile, tiles before the window is whole, first tile that is masked, tiles): the tiles of keys to take."""
    tiles = (first_position + tokens + TILE - 1) // TILE
    full = (first_position + 1) // TILE
    begin = first_position * 0
    entered = begin
    if WINDOW:
        begin = gl.maximum(first_position - window + 1, 0) // TILE
        entered = gl.minimum((gl.maximum(first_position + tokens - window, 0) + TILE - 1) // TILE, tiles)
        full = gl.maximum(full, entered)
    return begin, entered, full, tiles


@gluon.jit
def _place(n, STAGES: gl.constexpr):
    """(stage, phase of its barriers) of the n-th tile that is copied. Unsigned, since divisions are cheaper then."""
    n = n.to(gl.uint32)
    return (n % STAGES).to(gl.int32), (n // STAGES & 1).to(gl.int32)


@gluon.jit
def _copy_partition(
    k_tiles, v_tiles, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, table_ptr, plan_ptr, table_stride, item, items,
    window, DIM: gl.constexpr, TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, ENTRY: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of keys of each item, the last first. What lies past the last key is left out as `attend_pages`
    does.
    """
    copied = item * 0
    for at in range(item, items, gl.num_programs(0)):
        entry = plan_ptr + at // HEADS * ENTRY
        column = at % HEADS * DIM
        tokens = gl.load(entry + 1)
        if tokens > 0:
            first_position = gl.load(entry + 2)
            keys = gl.load(entry + 3)
            table = table_ptr + gl.load(entry + 4).to(gl.int64) * table_stride
            begin, _, _, tiles = _span(first_position, tokens, window, TILE, WINDOW)
            for i in range(tiles - begin):
                first = (tiles - 1 - i) * TILE
                block = gl.load(table + first // BLOCK_SIZE)
                slot = first % BLOCK_SIZE - gl.maximum(first + TILE - keys, 0)
                stage, phase = _place(copied + i, STAGES)
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_ready.index(stage), k_tiles.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_tiles, [block, slot, column], k_ready.index(stage), k_bufs.index(stage)
                )
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_ready.index(stage), v_tiles.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_tiles, [block, slot, column], v_ready.index(stage), v_bufs.index(stage)
                )
            copied += tiles - begin


@gluon.jit
def _weigh(
    score, top, total, first, early, position, window, scale, cap, score_layout: gl.constexpr,
    TILE: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """(weights, top, total, what everything before is scaled with)."""
    weigh = scale
    if CAP:
        score = cap - 2.0 * cap / (gl.exp2(score * scale) + 1.0)
        weigh = 1.0
    if MASKED:
        key = first - early + gl.arange(0, TILE, layout=gl.SliceLayout(0, score_layout))
        seen = (key[None, :] <= position[:, None]) & (key >= first)[None, :]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = gl.where(seen, score, float("-inf"))
    higher = gl.maximum(top, gl.max(score, 1) * weigh)
    base = higher
    if MASKED:
        base = gl.where(higher == float("-inf"), 0.0, higher)
    weight = gl.exp2(score * weigh - base[:, None])
    shrink = gl.exp2(top - base)
    return weight, higher, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _steps(
    acc, weight, top, total, i, stop, base, q, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, tiles, keys, position,
    window, scale, cap, score_layout: gl.constexpr, acc_layout: gl.constexpr, weight_layout: gl.constexpr,
    DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """The item's tiles from the `i`-th up to `stop`: each one's scores, and the values of the one before.

    `base` tiles of other items were copied before.
    """
    zeros = gl.zeros([ROWS, TILE], gl.float32, layout=score_layout)
    for n in range(i, stop):
        stage, phase = _place(base + n, STAGES)
        k = k_bufs.index(stage).reshape([TILE, DIM])
        mbarrier.wait(k_ready.index(stage), phase)
        score = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        stage_2, phase_2 = _place(base + n - 1, STAGES)
        v = v_bufs.index(stage_2).reshape([TILE, DIM])
        mbarrier.wait(v_ready.index(stage_2), phase_2)
        acc = warpgroup_mma(weight, v, acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])
        gl.thread_barrier()
        mbarrier.arrive(k_free.index(stage), count=1)
        first = (tiles - 1 - n) * TILE
        early = gl.maximum(first + TILE - keys, 0)
        next_weight, top, total, shrink = _weigh(
            score, top, total, first, early, position, window, scale, cap, score_layout, TILE, MASKED, WINDOW, CAP
        )  # fmt: skip
        next_weight = gl.convert_layout(next_weight.to(q.dtype), weight_layout)
        # Does not wait: the loop in it is what ptxas moves no instruction past, or it would weigh after the product.
        mbarrier.wait(v_ready.index(stage_2), phase_2)
        acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
        gl.thread_barrier()
        mbarrier.arrive(v_free.index(stage_2), count=1)
        weight = next_weight
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc_layout))[:, None]
    return acc, weight, top, total


@gluon.jit
def _where(start, tokens, head, PART: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """(token, query head, dim, which of them exist) of the PART-th queries of an item."""
    index = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    real = (index // GROUP < tokens)[:, None] & (dim < DIM)[None, :]
    return (start + index // GROUP).to(gl.int64), head * GROUP + index % GROUP, dim, real


@gluon.jit
def _queries(
    q_ptr, plan_ptr, at, q_stride, q_head_stride, PART: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    HEADS: gl.constexpr, ENTRY: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The PART-th queries of item `at`."""
    entry = plan_ptr + at // HEADS * ENTRY
    token, head, dim, real = _where(gl.load(entry), gl.load(entry + 1), at % HEADS, PART, GROUP, DIM, LAYOUT)
    return gl.load(q_ptr + (token * q_stride + head * q_head_stride)[:, None] + dim[None, :], mask=real, other=0.0)


@gluon.jit
def _compute_item(
    q, next_item, plan_ptr, q_ptr, out_ptr, lse_ptr, sinks_ptr, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free,
    q_stride, q_head_stride, out_stride, base, head, start, tokens, first_position, keys,
    begin, entered, full, tiles,
    window, scale, cap, PART: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, ENTRY: gl.constexpr, LAYOUT: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """The PART-th 64 query heads `q` of an item; returns those of the next, loaded while this one ends."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    q = gl.convert_layout(q, q_layout)
    row = PART * ROWS + gl.arange(0, ROWS, layout=row_layout)
    position = first_position + gl.minimum(row // GROUP, tokens - 1)
    acc = gl.zeros([ROWS, DIM], gl.float32, layout=acc_layout)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    total = gl.zeros([ROWS], gl.float32, layout=row_layout)
    # The first tile's scores, before there are weights.
    stage, phase = _place(base, STAGES)
    mbarrier.wait(k_ready.index(stage), phase)
    zeros = gl.zeros([ROWS, TILE], gl.float32, layout=score_layout)
    k = k_bufs.index(stage).reshape([TILE, DIM])
    score = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(stage), count=1)
    first = (tiles - 1) * TILE
    early = gl.maximum(first + TILE - keys, 0)
    weight, top, total, shrink = _weigh(
        score, top, total, first, early, position, window, scale, cap, score_layout, TILE, True, WINDOW, CAP
    )  # fmt: skip
    weight = gl.convert_layout(weight.to(q.dtype), weight_layout)
    diagonal = gl.maximum(tiles - full, 1)
    inside = gl.maximum(tiles - entered, diagonal)
    acc, weight, top, total = _steps(
        acc, weight, top, total, 1, diagonal, base, q, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, tiles, keys,
        position, window, scale, cap, score_layout, acc_layout, weight_layout, DIM, TILE, STAGES, True, WINDOW, CAP,
    )  # fmt: skip
    acc, weight, top, total = _steps(
        acc, weight, top, total, diagonal, inside, base, q, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free,
        tiles, keys, position, window, scale, cap, score_layout, acc_layout, weight_layout,
        DIM, TILE, STAGES, False, False, CAP,
    )  # fmt: skip
    if WINDOW:
        acc, weight, top, total = _steps(
            acc, weight, top, total, inside, tiles - begin, base, q, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free,
            tiles, keys, position, window, scale, cap, score_layout, acc_layout, weight_layout,
            DIM, TILE, STAGES, True, True, CAP,
        )  # fmt: skip
    last, phase = _place(base + tiles - begin - 1, STAGES)
    mbarrier.wait(v_ready.index(last), phase)
    v = v_bufs.index(last).reshape([TILE, DIM])
    acc = warpgroup_mma(weight, v, acc, is_async=True)
    next_q = _queries(
        q_ptr, plan_ptr, next_item, q_stride, q_head_stride, PART, GROUP, DIM, HEADS, ENTRY, LAYOUT
    )  # fmt: skip
    exists = row // GROUP < tokens
    head_of_row = head * GROUP + row % GROUP
    if SINKS:
        sink = gl.load(sinks_ptr + head_of_row).to(gl.float32) * _LOG2E
        higher = gl.maximum(top, sink)
        shrink = gl.exp2(top - higher)
        total = total * shrink + gl.exp2(sink - higher)
        top = higher
    total = gl.where(total > 0.0, total, 1.0)
    factor = 1.0 / total
    if SINKS:
        factor = factor * shrink
    if LSE:
        to = (start + row // GROUP).to(gl.int64) * (out_stride // DIM) + head_of_row
        gl.store(lse_ptr + to, (top + gl.log2(total)) * _LN2, mask=exists)
    acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
    gl.thread_barrier()
    mbarrier.arrive(v_free.index(last), count=1)
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc_layout))[:, None]
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
    token, query_head, dim, real = _where(start, tokens, head, PART, GROUP, DIM, LAYOUT)
    gl.store(out_ptr + (token * out_stride + query_head * DIM)[:, None] + dim[None, :], out, mask=real)
    return next_q


@gluon.jit
def _compute_partition(
    q_ptr, out_ptr, lse_ptr, sinks_ptr, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, plan_ptr,
    q_stride, q_head_stride, out_stride, item, items,
    window, scale, cap, PART: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, HEADS: gl.constexpr, ENTRY: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q = _queries(q_ptr, plan_ptr, item, q_stride, q_head_stride, PART, GROUP, DIM, HEADS, ENTRY, wide)
    base = item * 0
    for at in range(item, items, gl.num_programs(0)):
        entry = plan_ptr + at // HEADS * ENTRY
        tokens = gl.load(entry + 1)
        next_item = gl.minimum(at + gl.num_programs(0), items - 1)
        if tokens > 0:
            first_position = gl.load(entry + 2)
            begin, entered, full, tiles = _span(first_position, tokens, window, TILE, WINDOW)
            q = _compute_item(
                q, next_item, plan_ptr, q_ptr, out_ptr, lse_ptr, sinks_ptr,
                k_bufs, v_bufs, k_ready, v_ready, k_free, v_free,
                q_stride, q_head_stride, out_stride, base, at % HEADS, gl.load(entry), tokens, first_position,
                gl.load(entry + 3), begin, entered, full, tiles, window, scale, cap,
                PART, GROUP, DIM, TILE, STAGES, HEADS, ENTRY, wide, WINDOW, CAP, SINKS, LSE,
            )  # fmt: skip
            base += tiles - begin
        else:
            q = _queries(q_ptr, plan_ptr, next_item, q_stride, q_head_stride, PART, GROUP, DIM, HEADS, ENTRY, wide)


@gluon.jit(do_not_specialize=["table_ptr", "table_stride"])
def hopper_kernel(
    q_ptr, k_tiles, v_tiles, out_ptr, lse_ptr, sinks_ptr, table_ptr, plan_ptr,
    q_stride, q_head_stride, out_stride, table_stride, window, scale, cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, ENTRY: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Items are a kv head and a tile of 128 query heads, a whole number of tokens: each program takes one after
    another, and copies keys of the next while it ends one. Arguments as of the Triton kernel.
    """
    _grid_wait(PDL)
    item = gl.program_id(0)
    items = gl.load(plan_ptr + 6) * HEADS
    if item < items:
        k_bufs = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, 1, TILE, DIM], k_tiles.layout)
        v_bufs = gl.allocate_shared_memory(v_tiles.dtype, [STAGES, 1, TILE, DIM], v_tiles.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            # Of both warpgroups.
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_compute_partition, (
                    q_ptr, out_ptr, lse_ptr, sinks_ptr, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, plan_ptr,
                    q_stride, q_head_stride, out_stride, item, items, window, scale, cap,
                    0, GROUP, DIM, TILE, STAGES, HEADS, ENTRY, WINDOW, CAP, SINKS, LSE,
                )),
                (_compute_partition, (
                    q_ptr, out_ptr, lse_ptr, sinks_ptr, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, plan_ptr,
                    q_stride, q_head_stride, out_stride, item, items, window, scale, cap,
                    1, GROUP, DIM, TILE, STAGES, HEADS, ENTRY, WINDOW, CAP, SINKS, LSE,
                )),
                (_copy_partition, (
                    k_tiles, v_tiles, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, table_ptr, plan_ptr,
                    table_stride, item, items, window, DIM, TILE, BLOCK_SIZE, STAGES, HEADS, ENTRY, WINDOW,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
