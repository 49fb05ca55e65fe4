"""Paged attention over gathered keys: decode rows together, by length, longer queries one row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.cache.slots import slots_of
from rapid_infer.cache.spec import KV_CACHE_DTYPES
from rapid_infer.ops import OpInfo, register
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams, lacks
from rapid_infer.ops.providers.cpu.supports import not_on_cpu
from rapid_infer.ops.reference.kv_cache import load_heads, read_slots


def _cannot(info: OpInfo) -> Sequence[str]:
    return not_on_cpu(info) + lacks(info, *KV_CACHE_DTYPES)


@dataclass(frozen=True)
class _Decode:
    """Rows of one token each and of like length: their indices, and `[rows * longest]` slots of their keys.

    `run`: the slots of a single row that lie one after another, which need no copy. `hidden` `[rows, 1, 1, longest]` is
    minus infinity beyond a row's length; None when all are equally long.
    """

    rows: Tensor
    slots: Tensor
    run: slice | None
    hidden: Tensor | None


@dataclass(frozen=True)
class _Chunk:
    """One row with several tokens, `start .. stop` of the step, and the `[keys]` slots of its keys."""

    start: int
    stop: int
    slots: Tensor
    visible: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """`single`: the slots of the only row of the step, when it has one token and its keys lie one after another."""

    decode: list[_Decode]
    chunks: list[_Chunk]
    single: slice | None


def attention_plan(metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> _Plan:
    """Made once a step: lengths are read from the tensors here and nowhere else."""
    plan = metadata.plans.get("cpu attention")
    if plan is None:
        starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
        single = sum(1 for a, b in pairwise(starts) if b - a == 1)
        buckets: dict[int, list[int]] = {}
        for row in range(single):
            # By powers of two, so that a short row is never padded to more than twice its length.
            buckets.setdefault(lengths[row].bit_length(), []).append(row)
        decode = [_decode(metadata, rows, lengths, block_size, dtype) for rows in buckets.values()]
        chunks = []
        for row in range(single, len(lengths)):
            start, stop, n = starts[row], starts[row + 1], lengths[row]
            slots = _slots(metadata, metadata.rows[row : row + 1], n, block_size).view(-1)
            visible = None
            if n > stop - start:
                visible = torch.ones(stop - start, n, dtype=torch.bool).tril_(n - (stop - start))
            chunks.append(_Chunk(start, stop, slots, visible))
        alone = decode[0].run if len(decode) == 1 and not chunks else None
        plan = metadata.plans["cpu attention"] = _Plan(decode, chunks, alone)
    return plan


def _decode(
    metadata: AttentionMetadata, rows: list[int], lengths: list[int], block_size: int, dtype: torch.dtype
) -> _Decode:
    longest = max(lengths[row] for row in rows)
    index = torch.tensor(rows)
    slots = _slots(metadata, metadata.rows[index], longest, block_size)
    hidden = None
    if any(lengths[row] != longest for row in rows):
        beyond = torch.arange(longest) >= metadata.seq_lens[index].unsqueeze(1)
        # Padding reads the row's own first key: never a slot that nobody has written.
        slots = torch.where(beyond, slots[:, :1], slots)
        hidden = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -math.inf)[:, None, None]
    return _Decode(index, slots.reshape(-1), _run(slots) if len(rows) == 1 else None, hidden)


def _run(slots: Tensor) -> slice | None:
    first, last = int(slots[0, 0]), int(slots[0, -1])
    consecutive = last - first == slots.shape[1] - 1 and bool((slots[0].diff() == 1).all())
    return slice(first, last + 1) if consecutive else None


def _slots(metadata: AttentionMetadata, table_rows: Tensor, length: int, block_size: int) -> Tensor:
    """`[rows, length]` slots of the first `length` tokens of each row."""
    return slots_of(metadata.block_table, table_rows.unsqueeze(1), torch.arange(length), block_size)


def _attend_run(q: Tensor, k_cache: Tensor, v_cache: Tensor, run: slice, scale: float) -> Tensor:
    """One token, its keys read where they are.

    KV heads stand on the batch axis, so that the result needs no reordering.
    """
    kv_heads, dim = k_cache.shape[-2:]
    shape, strides = (kv_heads, 1, run.stop - run.start, dim), (dim, dim, kv_heads * dim, 1)
    keys, values = (
        cache.as_strided(shape, strides, cache.storage_offset() + run.start * kv_heads * dim)
        for cache in (k_cache, v_cache)
    )
    attended = F.scaled_dot_product_attention(q.view(kv_heads, 1, -1, dim), keys, values, scale=scale)
    return attended.view(1, -1, dim)


def _read(cache: Tensor, slots: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of these slots, in `dtype`."""
    if cache.dtype == dtype:
        return cache.view(-1, cache.shape[-2] * cache.shape[-1]).index_select(0, slots)
    return load_heads(read_slots(cache, slots), scale, dtype)


@register("paged_attention", "cpu", priority=10, supports=_cannot)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> Tensor:
    """Folds the query heads of a group into the query axis: grouped-query SDPA is several times slower on a CPU."""
    kv_heads, dim = k_cache.shape[-2], q.shape[-1]
    group = q.shape[1] // kv_heads
    plan = attention_plan(metadata, k_cache.shape[1], q.dtype)
    if plan.single is not None and k_cache.dtype == q.dtype:
        return _attend_run(q, k_cache, v_cache, plan.single, params.scale)
    k_scale, v_scale = (None, None) if params.kv_scales is None else params.kv_scales
    caches = ((k_cache, k_scale), (v_cache, v_scale))
    out = torch.empty_like(q) if len(plan.decode) + len(plan.chunks) > 1 else None
    for part in plan.decode:
        rows = len(part.rows)
        keys, values = (
            _read(cache, part.slots, scale, q.dtype).view(rows, -1, kv_heads, dim).transpose(1, 2)
            for cache, scale in caches
        )
        queries = q if out is None else q[part.rows]
        attended = F.scaled_dot_product_attention(
            queries.reshape(rows, kv_heads, group, dim), keys, values, attn_mask=part.hidden, scale=params.scale
        ).reshape(rows, -1, dim)
        if out is None:
            return attended
        out[part.rows] = attended
    for chunk in plan.chunks:
        keys, values = (
            _read(cache, chunk.slots, scale, q.dtype)
            .view(-1, kv_heads, dim)
            .transpose(0, 1)
            .repeat_interleave(group, dim=0)
            .unsqueeze(0)
            for cache, scale in caches
        )
        attended = F.scaled_dot_product_attention(
            q[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=chunk.visible,
            is_causal=chunk.visible is None,
            scale=params.scale,
        )
        tokens_first = attended.squeeze(0).transpose(0, 1)
        if out is None:
            return tokens_first
        out[chunk.start : chunk.stop] = tokens_first
    assert out is not None
    return out
