"""Attention of rows with several tokens: a program per tile of a row's tokens and kv head.

All query heads that share a kv head go together, so that they share what is read of its keys.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention import prefill_split
from rapid_infer.ops.providers.triton.attention.pages import attend_pages
from rapid_infer.ops.providers.triton.attention.prefill_config import (
    PAGE,
    PrefillConfig,
    choose,
    has_hopper_kernel,
    tma_view,
)
from rapid_infer.ops.providers.triton.attention.prefill_plan import ENTRY, prefill_plan
from rapid_infer.ops.providers.triton.attention.prefill_split import add_up, find_part, make_parts
from rapid_infer.ops.providers.triton.attention.tile import attend, finish
from rapid_infer.ops.providers.triton.kv_values import head_scales, queries_for_fp8
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options, start_next, wait_previous


@triton.jit
def _attend_all(
    q, position, k_ptr, v_ptr, k_tiles, v_tiles, head, table, first_position, start, stop, end, keys,
    block_stride, token_stride, head_stride, window, scale, cap,
    M: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) of queries whose first stands at `first_position` and last at `end - 1`, over keys from
    `start`, a multiple of TILE, to `stop`.

    Masks only where windows begin and along the diagonal; all queries see all keys of the tiles between.
    """
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    full = (first_position + 1) // TILE * TILE
    entered = first_position * 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        entered = tl.minimum((tl.maximum(end - window, 0) + TILE - 1) // TILE * TILE, end)
        full = tl.maximum(full, entered)
        begin, left = tl.maximum(begin, start), tl.minimum(entered, stop)
        if TMA:
            acc, top, total = attend_pages(
                acc, top, total, q, position, k_tiles, v_tiles, head * DIM, table, begin, left, keys,
                window, scale, cap, DIM, TILE, BLOCK_SIZE, True, True, CAP, STAGES,
            )  # fmt: skip
        else:
            acc, top, total = attend(
                acc, top, total, q, position, k_ptr + head * head_stride, v_ptr + head * head_stride, table,
                begin, left, keys, block_stride, token_stride, window, scale, cap,
                DIM, DIM_PAD, TILE, BLOCK_SIZE, True, True, CAP,
            )  # fmt: skip
    entered, whole = tl.maximum(entered, start), tl.minimum(full, stop)
    full = tl.maximum(full, start)
    if TMA:
        acc, top, total = attend_pages(
            acc, top, total, q, position, k_tiles, v_tiles, head * DIM, table, entered, whole, keys,
            window, scale, cap, DIM, TILE, BLOCK_SIZE, False, False, CAP, STAGES,
        )  # fmt: skip
        acc, top, total = attend_pages(
            acc, top, total, q, position, k_tiles, v_tiles, head * DIM, table, full, stop, keys,
            window, scale, cap, DIM, TILE, BLOCK_SIZE, True, WINDOW, CAP, STAGES,
        )  # fmt: skip
    else:
        acc, top, total = attend(
            acc, top, total, q, position, k_ptr + head * head_stride, v_ptr + head * head_stride, table,
            entered, whole, keys, block_stride, token_stride, window, scale, cap,
            DIM, DIM_PAD, TILE, BLOCK_SIZE, False, False, CAP,
        )  # fmt: skip
        acc, top, total = attend(
            acc, top, total, q, position, k_ptr + head * head_stride, v_ptr + head * head_stride, table,
            full, stop, keys, block_stride, token_stride, window, scale, cap,
            DIM, DIM_PAD, TILE, BLOCK_SIZE, True, WINDOW, CAP,
        )  # fmt: skip
    return acc, top, total


@triton.jit(do_not_specialize=["table_ptr", "table_stride"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_tiles, v_tiles, out_ptr, lse_ptr, sinks_ptr, table_ptr, plan_ptr,
    arrived_ptr, partial_ptr, stats_ptr, kv_scales_ptr,
    q_stride, q_head_stride, table_stride, block_stride, token_stride, head_stride, window, scale, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`k_tiles` and `v_tiles` are what `attend_pages` takes, if TMA. All tiles together have up to PARTS parts; with 0,
    each is one.
    """
    start_next(PDL)
    # One axis, since others end at 65,535 programs, and a tile may be one token.
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    if kv_scales_ptr is not None:
        k_scale, v_scale = head_scales(kv_scales_ptr, head, KV_HEADS)
        scale *= k_scale
    wait_previous(PDL)
    parts = 1
    part = 0
    exists = True
    if PARTS > 0:
        used = tl.load(plan_ptr + 6)
        parts = tl.maximum(PARTS // tl.maximum(used, 1), 1)
        part = tile % parts
        tile = tile // parts
        exists = tile < used
    plan_ptr += tile * ENTRY
    tokens = tl.load(plan_ptr + 1, mask=exists, other=0)
    if tokens > 0:
        first_position = tl.load(plan_ptr + 2)
        begin = 0
        end = first_position + tokens
        stop = end
        of_tile = 1
        if PARTS > 0:
            begin, stop, of_tile = find_part(first_position, end, part, parts, window, TILE, MIN_TILES, WINDOW)
        if part < of_tile:
            start = tl.load(plan_ptr)
            keys = tl.load(plan_ptr + 3)
            table = table_ptr + tl.load(plan_ptr + 4).to(tl.int64) * table_stride
            index = tl.arange(0, M)
            dim = tl.arange(0, DIM_PAD)
            token = index // GROUP
            query_head = head * GROUP + index % GROUP
            real = (index < TOKENS * GROUP) & (token < tokens)
            at = (start + token).to(tl.int64)
            q = tl.load(
                q_ptr + (at * q_stride + query_head * q_head_stride)[:, None] + dim[None, :],
                mask=real[:, None] & (dim < DIM)[None, :], other=0.0,
            )  # fmt: skip
            q_scale = scale
            if kv_scales_ptr is not None:
                q, q_scale = queries_for_fp8(q, scale)
            position = first_position + token
            acc, top, total = _attend_all(
                q, position, k_ptr, v_ptr, k_tiles, v_tiles, head, table, first_position, begin, stop, end, keys,
                block_stride, token_stride, head_stride, window, q_scale, cap,
                M, DIM, DIM_PAD, TILE, BLOCK_SIZE, TMA, STAGES, WINDOW, CAP,
            )  # fmt: skip
            if kv_scales_ptr is not None:
                acc *= v_scale
            done = of_tile == 1
            if PARTS > 0:  # noqa: SIM102 (known when compiled; the other is not)
                if of_tile > 1:
                    acc, top, total, done = add_up(
                        acc, top, total, arrived_ptr, partial_ptr, stats_ptr, tile, part, parts, of_tile,
                        head, KV_HEADS, M, DIM_PAD,
                    )  # fmt: skip
            if done:
                out, lse = finish(acc, top, total, sinks_ptr, query_head, real, SINKS)
                to = at * (KV_HEADS * GROUP) + query_head
                tl.store(
                    out_ptr + to[:, None] * DIM + dim[None, :], out.to(out_ptr.dtype.element_ty),
                    mask=real[:, None] & (dim < DIM)[None, :],
                )  # fmt: skip
                if LSE:
                    tl.store(lse_ptr + to, lse, mask=real)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    metadata: AttentionMetadata,
    window: int | None,
    sinks: Tensor | None,
    kv_scales: Tensor | None,
    scales: dict[str, Any],
    constants: dict[str, int],
    config: PrefillConfig | None = None,
) -> None:
    """Write `out` and `lse` for the tokens after those of decode rows; arguments as of `decode`."""
    group, kv_heads, dim = constants["GROUP"], k_cache.shape[-2], constants["DIM"]
    if config is None:
        same = k_cache.dtype == q.dtype
        possible = same and tma_view(k_cache, PAGE) is not None and tma_view(v_cache, PAGE) is not None
        decodes = metadata.num_decodes if metadata.decodes is None else 0
        sms = num_multiprocessors(q.device)
        hopper = dim == 128 and same and q.dtype.itemsize == 2 and has_hopper_kernel(q.device)
        config = choose(q.shape[0] - decodes, q.shape[1], dim, q.dtype, possible, sms, hopper)
    per_tile = max(config.queries // group, 1)
    if config.hopper:
        # Imported where it is used: Gluon is experimental, and of no use elsewhere.
        from rapid_infer.ops.providers.triton.attention.hopper_launch import prefill_hopper

        plan = prefill_plan(metadata, q.shape[0], per_tile)
        prefill_hopper(q, k_cache, v_cache, out, lse, metadata, plan, window, sinks, scales, config)
        return
    plan = prefill_plan(metadata, q.shape[0], per_tile)
    k_tiles: Any = k_cache
    v_tiles: Any = v_cache
    if config.tma:
        k_tiles, v_tiles = (
            TensorDescriptor.from_tensor(tma_view(cache, config.keys), [1, config.keys, dim])
            for cache in (k_cache, v_cache)
        )
    m = max(triton.next_power_of_2(per_tile * group), 16)
    parts = make_parts(metadata, q.shape[0], per_tile, kv_heads, m, constants["DIM_PAD"])
    of_parts = (plan, plan, plan) if parts is None else (parts.arrived, parts.partial, parts.stats)
    programs = plan.shape[0]
    if parts is not None and programs:
        programs = max(programs, parts.count)
    _prefill_kernel[(programs * kv_heads,)](
        q, k_cache, v_cache, k_tiles, v_tiles, out, lse if lse is not None else out, sinks if sinks is not None else q,
        metadata.block_table, plan, *of_parts, kv_scales,
        q.stride(0), q.stride(1), metadata.block_table.stride(0), *k_cache.stride()[:3], window or 0,
        KV_HEADS=kv_heads, TOKENS=per_tile, M=m, TMA=config.tma, STAGES=config.stages,
        PARTS=0 if parts is None else parts.count, MIN_TILES=prefill_split.MIN_TILES,
        WINDOW=window is not None, SINKS=sinks is not None, LSE=lse is not None,
        num_warps=config.warps, num_stages=config.stages,
        **scales, **{**constants, "TILE": config.keys}, **options(q),
    )  # fmt: skip
