"""The attention kernel for SM 90: scores of one or two pages of keys, while the values of those before are added up."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from rapid_infer.ops.providers.triton.attention.hopper_copy import PAGE, place
from rapid_infer.ops.providers.triton.attention.prefill_config import QUERIES

ROWS = gl.constexpr(QUERIES // 2)
"""Query heads of a warpgroup, of which there are two."""


@gluon.jit
def scores(q, k_bufs, k_ready, n, PAIR: gl.constexpr, layout: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """Of the n-th step's page and, if PAIR, the one before it; they are being made still."""
    stage, phase = place(n, STAGES)
    zeros = gl.zeros([ROWS, PAGE], gl.float32, layout=layout)
    mbarrier.wait(k_ready.index(stage), phase)
    k = k_bufs.index(2 * stage).reshape([PAGE, DIM])
    score = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    score_2 = zeros
    if PAIR:
        k = k_bufs.index(2 * stage + 1).reshape([PAGE, DIM])
        score_2 = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return score, score_2


@gluon.jit
def add(
    acc, weight, weight_2, v_bufs, v_ready, n, PAIR: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc with the n-th step's weighed values; they are being added still."""
    stage, phase = place(n, STAGES)
    mbarrier.wait(v_ready.index(stage), phase)
    acc = warpgroup_mma(weight, v_bufs.index(2 * stage).reshape([PAGE, DIM]), acc, is_async=True)
    if PAIR:
        acc = warpgroup_mma(weight_2, v_bufs.index(2 * stage + 1).reshape([PAGE, DIM]), acc, is_async=True)
    return acc


@gluon.jit
def give_back(free, n, STAGES: gl.constexpr):
    gl.thread_barrier()
    mbarrier.arrive(free.index(place(n, STAGES)[0]), count=1)


@gluon.jit
def _prepare(
    score, page, keys, position, window, scale, cap, layout: gl.constexpr,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """A page's scores, capped and masked."""
    if CAP:
        score = cap - 2.0 * cap / (gl.exp2(score * scale) + 1.0)
    if MASKED:
        first = page * PAGE
        early = gl.maximum(first + PAGE - keys, 0)
        key = first - early + gl.arange(0, PAGE, layout=gl.SliceLayout(0, layout))
        seen = (key[None, :] <= position[:, None]) & (key >= first)[None, :]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = gl.where(seen, score, float("-inf"))
    return score


@gluon.jit
def weigh(
    score, score_2, top, total, page, keys, position, window, scale, cap, layout: gl.constexpr, PAIR: gl.constexpr,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """(weights of the page and, if PAIR, of the one before it, top, total, what everything before is scaled with)."""
    score = _prepare(score, page, keys, position, window, scale, cap, layout, MASKED, WINDOW, CAP)
    highest = score
    if PAIR:
        score_2 = _prepare(score_2, page - 1, keys, position, window, scale, cap, layout, MASKED, WINDOW, CAP)
        highest = gl.maximum(score, score_2)
    weigh = scale
    if CAP:
        weigh = 1.0
    higher = gl.maximum(top, gl.max(highest, 1) * weigh)
    base = higher
    if MASKED:
        base = gl.where(higher == float("-inf"), 0.0, higher)
    weight = gl.exp2(score * weigh - base[:, None])
    weight_2 = weight
    added = weight
    if PAIR:
        weight_2 = gl.exp2(score_2 * weigh - base[:, None])
        added = weight + weight_2
    shrink = gl.exp2(top - base)
    return weight, weight_2, higher, total * shrink + gl.sum(added, 1), shrink


@gluon.jit
def step(
    acc, weight, weight_2, top, total, n, page, q, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, keys, position,
    window, scale, cap, score_layout: gl.constexpr, acc_layout: gl.constexpr, weight_layout: gl.constexpr,
    DIM: gl.constexpr, STAGES: gl.constexpr, BEFORE: gl.constexpr, PAIR: gl.constexpr,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """The scores of the n-th step, and the values of the one before, which had a pair of pages if BEFORE."""
    score, score_2 = scores(q, k_bufs, k_ready, n, PAIR, score_layout, DIM, STAGES)
    acc = add(acc, weight, weight_2, v_bufs, v_ready, n - 1, BEFORE, DIM, STAGES)
    values: gl.constexpr = 2 if BEFORE else 1
    if PAIR:
        score, score_2 = warpgroup_mma_wait(values, deps=[score, score_2])
    else:
        score = warpgroup_mma_wait(values, deps=[score])
    give_back(k_free, n, STAGES)
    score, score_2, top, total, shrink = weigh(
        score, score_2, top, total, page, keys, position, window, scale, cap, score_layout, PAIR, MASKED, WINDOW, CAP
    )  # fmt: skip
    next_weight = gl.convert_layout(score.to(q.dtype), weight_layout)
    next_weight_2 = next_weight
    if PAIR:
        next_weight_2 = gl.convert_layout(score_2.to(q.dtype), weight_layout)
    # Does not wait: the loop in it is what ptxas moves no instruction past, or it would weigh after the product.
    stage, phase = place(n - 1, STAGES)
    mbarrier.wait(v_ready.index(stage), phase)
    if BEFORE:
        acc, weight, weight_2 = warpgroup_mma_wait(0, deps=[acc, weight, weight_2])
    else:
        acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
    give_back(v_free, n - 1, STAGES)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc_layout))[:, None]
    return acc, next_weight, next_weight_2, top, total
