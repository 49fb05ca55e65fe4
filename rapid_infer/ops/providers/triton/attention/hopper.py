"""Attention of rows with several tokens for SM 90 alone, in Gluon: a warp that copies, and two warpgroups that compute.

Triton waits for each product before it goes on. Here a warpgroup weighs keys while the tensor cores add up the values
of those before, and the two warpgroups run free of each other.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from rapid_infer.ops.providers.triton.attention.hopper_copy import PAGE, copy_partition, span, take
from rapid_infer.ops.providers.triton.attention.hopper_step import ROWS, add, give_back, scores, step, weigh

_LOG2E = gl.constexpr(math.log2(math.e))
_LN2 = gl.constexpr(math.log(2))


@gluon.jit
def _grid_wait(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


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
def _last(
    acc, weight, weight_2, n, v_bufs, v_ready, v_free, queue, queue_ready, queue_free, done, items,
    plan_ptr, q_ptr, q_stride, q_head_stride,
    PAIR: gl.constexpr, PART: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, ENTRY: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(acc with the values of the item's last step, the n-th, and the next item and its queries, loaded meanwhile)."""
    acc = add(acc, weight, weight_2, v_bufs, v_ready, n, PAIR, DIM, STAGES)
    next_item = take(queue, queue_ready, queue_free, done)
    next_q = _queries(
        q_ptr, plan_ptr, gl.minimum(next_item, items - 1), q_stride, q_head_stride,
        PART, GROUP, DIM, HEADS, ENTRY, LAYOUT,
    )  # fmt: skip
    if PAIR:
        acc, weight, weight_2 = warpgroup_mma_wait(0, deps=[acc, weight, weight_2])
    else:
        acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
    give_back(v_free, n, STAGES)
    return acc, next_item, next_q


@gluon.jit
def _compute_item(
    q, items, done, queue, queue_ready, queue_free, plan_ptr, q_ptr, out_ptr, lse_ptr, sinks_ptr,
    k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, q_stride, q_head_stride, out_stride, base, head,
    start, tokens, first_position, keys, pages, masked, begin, entered, alone,
    window, scale, cap, PART: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, ENTRY: gl.constexpr, LAYOUT: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """The PART-th 64 query heads `q` of an item whose first step is the `base`-th; returns (next item, its queries)."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
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
    # The first page's scores, before there are weights.
    score, score_2 = scores(q, k_bufs, k_ready, base, False, score_layout, DIM, STAGES)
    score = warpgroup_mma_wait(0, deps=[score])
    give_back(k_free, base, STAGES)
    score, score_2, top, total, shrink = weigh(
        score, score_2, top, total, pages - 1, keys, position, window, scale, cap, score_layout,
        False, True, WINDOW, CAP,
    )  # fmt: skip
    weight = gl.convert_layout(score.to(q.dtype), weight_layout)
    whole = alone
    if WINDOW:
        whole = gl.maximum(pages - entered, masked)
    for i in range(1, masked):
        acc, weight, _, top, total = step(
            acc, weight, weight, top, total, base + i, pages - 1 - i, q, k_bufs, v_bufs, k_ready, v_ready, k_free,
            v_free, keys, position, window, scale, cap, score_layout, acc_layout, weight_layout, DIM, STAGES,
            False, False, True, WINDOW, CAP,
        )  # fmt: skip
    for i in range(masked, whole):
        acc, weight, _, top, total = step(
            acc, weight, weight, top, total, base + i, pages - 1 - i, q, k_bufs, v_bufs, k_ready, v_ready, k_free,
            v_free, keys, position, window, scale, cap, score_layout, acc_layout, weight_layout, DIM, STAGES,
            False, False, False, False, CAP,
        )  # fmt: skip
    if WINDOW:
        for i in range(whole, alone):
            acc, weight, _, top, total = step(
                acc, weight, weight, top, total, base + i, pages - 1 - i, q, k_bufs, v_bufs, k_ready, v_ready, k_free,
                v_free, keys, position, window, scale, cap, score_layout, acc_layout, weight_layout, DIM, STAGES,
                False, False, True, True, CAP,
            )  # fmt: skip
        # As below, but that branch must not exist here: nothing reaches it, and Triton 3.6 fails to compile it.
        acc, next_item, next_q = _last(
            acc, weight, weight, base + alone - 1, v_bufs, v_ready, v_free, queue, queue_ready, queue_free, done, items,
            plan_ptr, q_ptr, q_stride, q_head_stride, False, PART, GROUP, DIM, STAGES, HEADS, ENTRY, LAYOUT,
        )  # fmt: skip
    elif alone == pages:
        acc, next_item, next_q = _last(
            acc, weight, weight, base + alone - 1, v_bufs, v_ready, v_free, queue, queue_ready, queue_free, done, items,
            plan_ptr, q_ptr, q_stride, q_head_stride, False, PART, GROUP, DIM, STAGES, HEADS, ENTRY, LAYOUT,
        )  # fmt: skip
    else:
        steps = alone + (pages - alone) // 2
        acc, weight, weight_2, top, total = step(
            acc, weight, weight, top, total, base + alone, pages - 1 - alone, q, k_bufs, v_bufs, k_ready, v_ready,
            k_free, v_free, keys, position, window, scale, cap, score_layout, acc_layout, weight_layout, DIM, STAGES,
            False, True, False, False, CAP,
        )  # fmt: skip
        for i in range(alone + 1, steps):
            acc, weight, weight_2, top, total = step(
                acc, weight, weight_2, top, total, base + i, pages - 1 - 2 * i + alone, q, k_bufs, v_bufs, k_ready,
                v_ready, k_free, v_free, keys, position, window, scale, cap, score_layout, acc_layout, weight_layout,
                DIM, STAGES, True, True, False, False, CAP,
            )  # fmt: skip
        acc, next_item, next_q = _last(
            acc, weight, weight_2, base + steps - 1, v_bufs, v_ready, v_free, queue, queue_ready, queue_free, done,
            items, plan_ptr, q_ptr, q_stride, q_head_stride, True, PART, GROUP, DIM, STAGES, HEADS, ENTRY, LAYOUT,
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
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc_layout))[:, None]
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
    token, query_head, dim, real = _where(start, tokens, head, PART, GROUP, DIM, LAYOUT)
    gl.store(out_ptr + (token * out_stride + query_head * DIM)[:, None] + dim[None, :], out, mask=real)
    return next_item, next_q


@gluon.jit
def _compute_partition(
    q_ptr, out_ptr, lse_ptr, sinks_ptr, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free,
    queue, queue_ready, queue_free, plan_ptr, q_stride, q_head_stride, out_stride, item, items,
    window, scale, cap, PART: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, STAGES: gl.constexpr, HEADS: gl.constexpr, ENTRY: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q = _queries(q_ptr, plan_ptr, item, q_stride, q_head_stride, PART, GROUP, DIM, HEADS, ENTRY, wide)
    base = item * 0
    done = item * 0
    while item < items:
        entry = plan_ptr + item // HEADS * ENTRY
        tokens = gl.load(entry + 1)
        if tokens > 0:
            first_position = gl.load(entry + 2)
            pages, masked, begin, entered, alone = span(first_position, tokens, window, WINDOW)
            item, q = _compute_item(
                q, items, done, queue, queue_ready, queue_free, plan_ptr, q_ptr, out_ptr, lse_ptr, sinks_ptr,
                k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, q_stride, q_head_stride, out_stride, base,
                item % HEADS, gl.load(entry), tokens, first_position, gl.load(entry + 3),
                pages, masked, begin, entered, alone, window, scale, cap,
                PART, GROUP, DIM, STAGES, HEADS, ENTRY, wide, WINDOW, CAP, SINKS, LSE,
            )  # fmt: skip
            base += alone + (pages - begin - alone) // 2
        else:
            item = take(queue, queue_ready, queue_free, done)
            q = _queries(
                q_ptr, plan_ptr, gl.minimum(item, items - 1), q_stride, q_head_stride,
                PART, GROUP, DIM, HEADS, ENTRY, wide,
            )  # fmt: skip
        done += 1


@gluon.jit(do_not_specialize=["table_ptr", "table_stride"])
def hopper_kernel(
    q_ptr, k_tiles, v_tiles, out_ptr, lse_ptr, sinks_ptr, table_ptr, plan_ptr,
    q_stride, q_head_stride, out_stride, table_stride, window, scale, cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, ENTRY: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Items are a kv head and a tile of 128 query heads, a whole number of tokens: each program takes the next one that
    nobody has taken, and copies its keys while it ends another.

    Arguments as of the Triton kernel; STAGES are of two pages.
    """
    _grid_wait(PDL)
    item = gl.program_id(0)
    items = gl.load(plan_ptr + 6) * HEADS
    if item < items:
        k_bufs = gl.allocate_shared_memory(k_tiles.dtype, [2 * STAGES, 1, PAGE, DIM], k_tiles.layout)
        v_bufs = gl.allocate_shared_memory(v_tiles.dtype, [2 * STAGES, 1, PAGE, DIM], v_tiles.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        queue_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        queue_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(queue_ready.index(i), count=1)
            mbarrier.init(queue_free.index(i), count=2)
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
                    q_ptr, out_ptr, lse_ptr, sinks_ptr, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free,
                    queue, queue_ready, queue_free, plan_ptr,
                    q_stride, q_head_stride, out_stride, item, items, window, scale, cap,
                    0, GROUP, DIM, STAGES, HEADS, ENTRY, WINDOW, CAP, SINKS, LSE,
                )),
                (_compute_partition, (
                    q_ptr, out_ptr, lse_ptr, sinks_ptr, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free,
                    queue, queue_ready, queue_free, plan_ptr,
                    q_stride, q_head_stride, out_stride, item, items, window, scale, cap,
                    1, GROUP, DIM, STAGES, HEADS, ENTRY, WINDOW, CAP, SINKS, LSE,
                )),
                (copy_partition, (
                    k_tiles, v_tiles, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, queue, queue_ready, queue_free,
                    table_ptr, plan_ptr, table_stride, item, items, window,
                    DIM, BLOCK_SIZE, STAGES, HEADS, ENTRY, WINDOW,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
