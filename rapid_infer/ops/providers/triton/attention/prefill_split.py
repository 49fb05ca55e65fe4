"""Few queries over many keys: several programs take parts of a tile's keys, and the last to be done adds them up.

How many parts a tile has depends on what the step holds, which the device alone knows; that they are few enough to
have room follows from numbers known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention.tile import last_to_arrive, load_part, merge, store_part
from rapid_infer.ops.providers.triton.launch import num_multiprocessors

PROGRAMS_PER_MULTIPROCESSOR = 2
MIN_TILES = 8
"""Of keys, in a part."""


@dataclass(frozen=True)
class Parts:
    """Room for `count` parts of each kv head.

    arrived    `[count, kv_heads]` int32 zeros: parts done of each tile; left as zeros
    partial    `[count, kv_heads, queries, dim]` fp32, dim padded: their unscaled results
    stats      `[count, kv_heads, 2, queries]` fp32: their highest score and sum of weights
    """

    count: int
    arrived: Tensor
    partial: Tensor
    stats: Tensor


def make_parts(
    metadata: AttentionMetadata, tokens: int, per_tile: int, kv_heads: int, queries: int, dim_pad: int
) -> Parts | None:
    """For a step with `tokens` tokens in tiles of `per_tile`, made by its first layer.

    None where tiles keep all multiprocessors busy.
    """
    device = metadata.seq_lens.device
    count = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // kv_heads
    # Decode rows may be among the tokens, so there may be fewer tiles.
    if tokens // per_tile > 2 * count:
        return None
    key = ("triton prefill parts", count, kv_heads, queries, dim_pad)
    parts = metadata.plans.get(key)
    if parts is None:
        parts = metadata.plans[key] = Parts(
            count,
            torch.zeros(count, kv_heads, dtype=torch.int32, device=device),
            torch.empty(count, kv_heads, queries, dim_pad, dtype=torch.float32, device=device),
            torch.empty(count, kv_heads, 2, queries, dtype=torch.float32, device=device),
        )
    return parts


@triton.jit
def find_part(first_position, end, part, parts, window, TILE: tl.constexpr, MIN_TILES: tl.constexpr,
              WINDOW: tl.constexpr):  # fmt: skip
    """(begin, end, parts): the keys of a part of a tile whose queries see those up to `end`, and how many have some."""
    first = first_position * 0
    if WINDOW:
        first = tl.maximum(first_position - window + 1, 0) // TILE
    tiles = (end + TILE - 1) // TILE - first
    # A part takes about two tiles' time to be added, one after another: n parts of t tiles take least at the root.
    least = tl.maximum(tl.sqrt(tiles.to(tl.float32)).to(tl.int32), MIN_TILES)
    each = tl.maximum((tiles + parts - 1) // parts, least)
    begin = (first + part * each) * TILE
    return begin, tl.minimum(begin + each * TILE, end), (tiles + each - 1) // each


@triton.jit
def add_up(
    acc, top, total, arrived_ptr, partial_ptr, stats_ptr, tile, part, parts, of_tile, head, kv_heads,
    M: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """(acc, top, total, whether this was the last): leaves a part; the last has all, always added in the same order.

    `of_tile` of the `parts` that a tile may have are used.
    """
    index = tl.arange(0, M)
    everything = index < M
    first = tile * parts
    store_part(
        acc, top, total, partial_ptr, stats_ptr, (first + part) * kv_heads + head, index, everything, M, DIM_PAD
    )  # fmt: skip
    last = last_to_arrive(arrived_ptr + tile * kv_heads + head, of_tile)
    if last:
        acc, top, total = load_part(
            partial_ptr, stats_ptr, first * kv_heads + head, index, everything, M, DIM_PAD
        )  # fmt: skip
        for nth in range(1, of_tile):
            other, other_top, other_total = load_part(
                partial_ptr, stats_ptr, (first + nth) * kv_heads + head, index, everything, M, DIM_PAD
            )
            acc, top, total = merge(acc, top, total, other, other_top, other_total)
    return acc, top, total, last
