"""MLA among a step's tokens: a program per head and tile of a row's tokens, or some of its tiles.

The softmax starts from what attention to earlier tokens gave, so the two parts need no kernel to be put together.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention.prefill_plan import ENTRY, prefill_plan
from rapid_infer.ops.providers.triton.attention.tile import matmul, score_scales
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options, start_next, wait_previous

QUERIES = 128
"""Tokens of a tile."""
FEW_QUERIES = 64
"""The same where larger tiles would leave multiprocessors without work."""
TILE = 64
"""Keys."""
FP32_QUERIES = FP32_TILE = 16
STAGES = 3
_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _attend(
    acc, top, total, q_nope, q_rope, position, kv_ptr, key_ptr, begin, end, kv_stride, key_stride, scale,
    NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the row's tokens `begin .. end` in; without MASKED they are whole tiles that every query sees."""
    nope, rope, v_at = tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, V_PAD)
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        # 65,536 tokens of 128 heads have more keys and values than 32 bits count.
        at = token[:, None].to(tl.int64)
        kv, shared = kv_ptr + at * kv_stride, key_ptr + at * key_stride
        if MASKED or NOPE < NOPE_PAD or ROPE < ROPE_PAD or V < V_PAD:
            inside = (token < end)[:, None]
            k_nope = tl.load(kv + nope[None, :], mask=inside & (nope < NOPE)[None, :], other=0.0)
            k_rope = tl.load(shared + rope[None, :], mask=inside & (rope < ROPE)[None, :], other=0.0)
            v = tl.load(kv + NOPE + v_at[None, :], mask=inside & (v_at < V)[None, :], other=0.0)
        else:
            k_nope = tl.load(kv + nope[None, :])
            k_rope = tl.load(shared + rope[None, :])
            v = tl.load(kv + NOPE + v_at[None, :])
        score = matmul(q_nope, tl.trans(k_nope), tl.zeros([q_nope.shape[0], TILE], tl.float32))
        score = matmul(q_rope, tl.trans(k_rope), score) * scale
        if MASKED:
            score = tl.where(token[None, :] <= position[:, None], score, float("-inf"))
        # Token 0 is in the first tile and seen by all, so from there on a highest score exists.
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        acc = matmul(weight.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    return acc, top, total


@triton.jit
def _prefill_kernel(
    q_nope_ptr, q_rope_ptr, kv_ptr, key_ptr, context_lse_ptr, out_ptr, plan_ptr,
    nope_stride, nope_head_stride, rope_stride, rope_head_stride, kv_stride, kv_head_stride, key_stride, scale,
    HEADS: tl.constexpr, M: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    TILE: tl.constexpr, CONTEXT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    head = tl.program_id(0)
    nope, rope, v_at = tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, V_PAD)
    nth = tl.arange(0, M)
    wait_previous(PDL)
    for tile in range(tl.program_id(1), tl.load(plan_ptr + 6), tl.num_programs(1)):
        entry = plan_ptr + tile * ENTRY
        first = tl.load(entry)
        tokens = tl.load(entry + 1)
        before = tl.load(entry + 5)
        if tokens > 0:
            position = before + nth
            exists = nth < tokens
            at = (first + nth).to(tl.int64)
            q_nope = tl.load(
                q_nope_ptr + (at * nope_stride)[:, None] + head * nope_head_stride + nope[None, :],
                mask=exists[:, None] & (nope < NOPE)[None, :], other=0.0,
            )  # fmt: skip
            q_rope = tl.load(
                q_rope_ptr + (at * rope_stride)[:, None] + head * rope_head_stride + rope[None, :],
                mask=exists[:, None] & (rope < ROPE)[None, :], other=0.0,
            )  # fmt: skip
            place = at * HEADS + head
            out = out_ptr + place[:, None] * V + v_at[None, :]
            real = exists[:, None] & (v_at < V)[None, :]
            acc = tl.zeros([M, V_PAD], tl.float32)
            top = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            if CONTEXT:
                top = tl.load(context_lse_ptr + place, mask=exists, other=float("-inf")) * _LOG2E
                found = top > float("-inf")
                # Already divided by its denominator, which `top` therefore stands for as a single weight.
                total = tl.where(found, 1.0, 0.0)
                acc = tl.load(out, mask=real & found[:, None], other=0.0).to(tl.float32)
            start = (first - before).to(tl.int64)
            kv = kv_ptr + start * kv_stride + head * kv_head_stride
            key = key_ptr + start * key_stride
            full = (before + 1) // TILE * TILE
            acc, top, total = _attend(
                acc, top, total, q_nope, q_rope, position, kv, key, full * 0, full, kv_stride, key_stride, scale,
                NOPE, NOPE_PAD, ROPE, ROPE_PAD, V, V_PAD, TILE, False,
            )  # fmt: skip
            acc, top, total = _attend(
                acc, top, total, q_nope, q_rope, position, kv, key, full, before + tokens, kv_stride, key_stride, scale,
                NOPE, NOPE_PAD, ROPE, ROPE_PAD, V, V_PAD, TILE, True,
            )  # fmt: skip
            tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def mla_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    key: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    context_lse: Tensor | None,
) -> None:
    """Reads no tensor on the host. Features of each argument must lie side by side."""
    tokens, heads, nope = q_nope.shape
    rope, v = q_rope.shape[-1], out.shape[-1]
    if any(t.stride(-1) != 1 for t in (q_nope, q_rope, kv, key)):
        raise ValueError("features of queries, keys and values must lie side by side")
    exact = q_nope.element_size() > 2
    own = tokens - metadata.num_decodes if metadata.decodes is None else tokens
    many = own * heads > QUERIES * num_multiprocessors(q_nope.device)
    m = FP32_QUERIES if exact else QUERIES if many else FEW_QUERIES
    plan = prefill_plan(metadata, tokens, m)
    # As many tiles as long rows have. A graph may hold hundreds of short rows, each with a tile, and seldom does: a
    # program takes several of them rather than each of hundreds finding none.
    programs = min(plan.shape[0], own // m + 2 * num_multiprocessors(q_nope.device) // heads + 1)
    _prefill_kernel[(heads, programs)](
        q_nope, q_rope, kv, key, context_lse if context_lse is not None else out, out, plan,
        q_nope.stride(0), q_nope.stride(1), q_rope.stride(0), q_rope.stride(1), kv.stride(0), kv.stride(1),
        key.stride(0), score_scales(scale, None)["scale"],
        HEADS=heads, M=m, NOPE=nope, NOPE_PAD=max(triton.next_power_of_2(nope), 16),
        ROPE=rope, ROPE_PAD=max(triton.next_power_of_2(rope), 16), V=v, V_PAD=max(triton.next_power_of_2(v), 16),
        TILE=FP32_TILE if exact else TILE, CONTEXT=context_lse is not None,
        num_warps=8 if m == QUERIES else 4, num_stages=STAGES, **options(q_nope),
    )  # fmt: skip
