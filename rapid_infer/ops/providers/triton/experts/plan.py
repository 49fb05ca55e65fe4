"""Which rows of work belong to which expert: tokens' choices sorted by expert and cut into tiles, on the device.

A choice is one of a token's `top_k` experts, numbered `token * top_k + k`. An expert's choices stand one after another
in their own order, and its tiles take `tile` of them each; the last may take fewer. Launches go by the most tiles that
there can be, so nothing depends on how tokens choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

CHOICES_AT_ONCE = 4096
"""Up to so many every program counts all; of more, each takes a part."""
PARTS_AT_ONCE = 16
TILES_AT_ONCE = 64


@dataclass(frozen=True)
class ExpertsPlan:
    """Of `choices` choices in at most `tiles` tiles.

    order   `[choices]` int32: the choice at each sorted place
    expert  `[tiles]` int32, -1 for a tile that is not needed
    first, last  `[tiles]` int32: the tile's sorted places, `first` to before `last`
    """

    tiles: int
    order: Tensor
    expert: Tensor
    first: Tensor
    last: Tensor


@triton.jit
def _choices(slots_ptr, part, choices, CHOICES: tl.constexpr):
    """(choices, slots), each `[CHOICES]`, of a part; a slot of -1 beyond the last."""
    choice = part * CHOICES + tl.arange(0, CHOICES)
    return choice, tl.load(slots_ptr + choice, mask=choice < choices, other=-1)


@triton.jit
def _count_kernel(slots_ptr, counts_ptr, choices, EXPERTS_PAD: tl.constexpr, CHOICES: tl.constexpr, PDL: tl.constexpr):
    """A program per part counts how often each expert is chosen in it."""
    start_next(PDL)
    wait_previous(PDL)
    part = tl.program_id(0)
    _, slot = _choices(slots_ptr, part, choices, CHOICES)
    counts = tl.histogram(slot, EXPERTS_PAD, mask=slot >= 0)
    tl.store(counts_ptr + part * EXPERTS_PAD + tl.arange(0, EXPERTS_PAD), counts)


@triton.jit(do_not_specialize=["tiles"])
def _sort_kernel(
    slots_ptr, counts_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, choices, parts, experts, tiles,
    EXPERTS_PAD: tl.constexpr, TILE: tl.constexpr, CHOICES: tl.constexpr, TILES: tl.constexpr,
    COUNTED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per expert and part adds up all counts, to find its own place without waiting for another; those of
    one more expert mark the tiles that are left over.
    """
    start_next(PDL)
    wait_previous(PDL)
    expert, part = tl.program_id(0), tl.program_id(1)
    bins = tl.arange(0, EXPERTS_PAD)
    choice, slot = _choices(slots_ptr, part, choices, CHOICES)
    before = tl.zeros([EXPERTS_PAD], tl.int32)
    if COUNTED:
        counts = tl.zeros([EXPERTS_PAD], tl.int32)
        for at in range(0, parts, PARTS):
            nth = at + tl.arange(0, PARTS)
            some = tl.load(
                counts_ptr + nth[:, None] * EXPERTS_PAD + bins[None, :], mask=(nth < parts)[:, None], other=0
            )
            counts += tl.sum(some, 0)
            before += tl.sum(tl.where((nth < part)[:, None], some, 0), 0)
    else:
        counts = tl.histogram(slot, EXPERTS_PAD, mask=slot >= 0)
    place = tl.sum(tl.where(bins < expert, counts, 0))
    first_tile = tl.sum(tl.where(bins < expert, (counts + TILE - 1) // TILE, 0))
    if expert == experts:
        for at in range(first_tile + part * TILES, tiles, tl.num_programs(1) * TILES):
            tile = at + tl.arange(0, TILES)
            tl.store(expert_ptr + tile, tl.full([TILES], -1, tl.int32), mask=tile < tiles)
    else:
        end = place + tl.sum(tl.where(bins == expert, counts, 0))
        for at in range(part * TILES, (end - place + TILE - 1) // TILE, tl.num_programs(1) * TILES):
            nth = at + tl.arange(0, TILES)
            mine = place + nth * TILE < end
            tl.store(expert_ptr + first_tile + nth, tl.full([TILES], 0, tl.int32) + expert, mask=mine)
            tl.store(first_ptr + first_tile + nth, place + nth * TILE, mask=mine)
            tl.store(last_ptr + first_tile + nth, tl.minimum(place + (nth + 1) * TILE, end), mask=mine)
        place += tl.sum(tl.where(bins == expert, before, 0))
        hit = (slot == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(hit) - 1, choice, mask=hit > 0)


def most_tiles(choices: int, experts: int, tile: int) -> int:
    """Each expert that is chosen at all may leave one tile that is not full."""
    return choices // tile + min(choices, experts)


def experts_plan(slots: Tensor, experts: int, tile: int) -> ExpertsPlan:
    """`slots` `[tokens, top_k]` int32, contiguous; below zero for no expert."""
    choices = slots.numel()
    tiles = most_tiles(choices, experts, tile)

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=slots.device)

    plan = ExpertsPlan(tiles, empty(choices), empty(tiles), empty(tiles), empty(tiles))
    at_once = min(triton.next_power_of_2(choices), CHOICES_AT_ONCE)
    parts, experts_pad = triton.cdiv(choices, at_once), max(triton.next_power_of_2(experts), 16)
    counts = empty(parts * experts_pad)
    warps = 4 if at_once <= 1024 else 8
    if parts > 1:
        _count_kernel[(parts,)](
            slots, counts, choices, EXPERTS_PAD=experts_pad, CHOICES=at_once, num_warps=warps, **options(slots)
        )
    _sort_kernel[(experts + 1, parts)](
        slots, counts, plan.order, plan.expert, plan.first, plan.last, choices, parts, experts, tiles,
        EXPERTS_PAD=experts_pad, TILE=tile, CHOICES=at_once, TILES=TILES_AT_ONCE,
        COUNTED=parts > 1, PARTS=PARTS_AT_ONCE, num_warps=warps, **options(slots),
    )  # fmt: skip
    return plan
