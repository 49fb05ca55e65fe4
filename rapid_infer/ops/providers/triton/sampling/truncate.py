"""min_p, top_k and top_p without a sort: parts of a row in parallel, but for the search of the last logit that stays.

The first kernel finds the maxima of groups of a row. The k-th best of these is a lower bound of the k-th best logit,
and close to it; the second one reads only groups that reach that bound, mostly a few hundred logits, and ranks them all
against all. The third writes the row, and reads again only groups of which something stays. Rows that are so flat that
more is needed are read as a whole in each step of a search.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.sampling.truncate_search import LEAST, end_of, key_of, last_place

GROUP = 16
"""Elements of a group, at least."""
LANES = 256
"""Groups of a part, and the distance between elements of a group: tokens that are alike often stand together."""
MOST_GROUPS = 16384
"""Of a row: as many as one program has registers for."""
AIM = 4096
"""Groups to look into when top_k does not say how many and top_p does not seem to be content with less."""
ROOM = 8192
"""Candidates that have room."""
FEW = 256
"""Candidates that are ranked against each other."""
STEP = 256
"""Groups to look into at once; fewer where they are larger."""
BLOCK = 4096
"""Elements to search at once."""

# Before every place: nothing is taken away from the row.
ALL = tl.constexpr(-(2**63))

# One kernel, which takes seconds to compile, for all that may be asked for.
_FIXED = ["given", "top_k_ptr", "top_p_ptr", "min_p_ptr", "top_k_stride", "top_p_stride", "min_p_stride"]


@triton.jit
def _settings(
    row, vocab, given, top_k_ptr, top_p_ptr, min_p_ptr, top_k_stride, top_p_stride, min_p_stride,
):  # fmt: skip
    """top_k, 0 where it takes nothing away, top_p and min_p."""
    top, least = (given & 1) > 0, (given & 2) > 0
    k = tl.load(top_k_ptr + row * top_k_stride, mask=top, other=0).to(tl.int32)
    p = tl.load(top_p_ptr + row * top_p_stride, mask=top, other=1.0)
    min_p = tl.load(min_p_ptr + row * min_p_stride, mask=least, other=0.0)
    return tl.where((k > 0) & (k < vocab), k, 0), p, min_p


@triton.jit(do_not_specialize=_FIXED)
def _maxima_kernel(
    logits_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maximum_ptr, part_top_ptr, part_mass_ptr,
    stride, given, top_k_stride, top_p_stride, min_p_stride, vocab,
    GROUP: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per part of a row: the maxima of its groups, infinity for NaN, and where the total counts the part's mass."""
    start_next(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, LANES)
    wait_previous(PDL)
    k, p, min_p = _settings(
        row, vocab, given, top_k_ptr, top_p_ptr, min_p_ptr, top_k_stride, top_p_stride, min_p_stride
    )  # fmt: skip
    if (k > 0) | (p < 1.0) | (min_p > 0.0):
        ids = (part * GROUP + tl.arange(0, GROUP))[:, None] * LANES + lane[None, :]
        x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        maxima = tl.max(tl.where(x == x, x, float("inf")), 0)
        at = row * tl.num_programs(0) + part
        tl.store(maximum_ptr + at * LANES + lane, maxima)
        top = tl.max(maxima, 0)
        if (k == 0) & (p < 1.0) & (top < float("inf")):
            mass = tl.sum(tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0), 0)
            tl.store(part_top_ptr + at, top)
            tl.store(part_mass_ptr + at, mass)


@triton.jit(do_not_specialize=_FIXED)
def _search_kernel(
    logits_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maximum_ptr, part_top_ptr, part_mass_ptr,
    group_ptr, number_ptr, id_ptr, last_ptr,
    stride, given, top_k_stride, top_p_stride, min_p_stride, vocab, groups,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
    AIM: tl.constexpr, ROOM: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per row: the place of the last logit that stays."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_previous(PDL)
    k, p, min_p = _settings(
        row, vocab, given, top_k_ptr, top_p_ptr, min_p_ptr, top_k_stride, top_p_stride, min_p_stride
    )  # fmt: skip
    last = tl.full((), ALL, tl.int64)
    if (k > 0) | (p < 1.0) | (min_p > 0.0):
        group = tl.arange(0, GROUPS)
        maxima = tl.load(maximum_ptr + row * groups + group, mask=group < groups, other=float("-inf"))
        top = tl.max(maxima, 0)
        # Neither NaN nor infinity is the best.
        if (top > float("-inf")) & (top < float("inf")):
            floor = key_of(top + tl.log(tl.where(min_p > 0.0, min_p, 1.0)))
            least = tl.where(min_p > 0.0, tl.maximum(floor, LEAST), LEAST)
            last = end_of(least)
            if (k > 0) | (p < 1.0):
                total = tl.full((), 0.0, tl.float32)
                if k == 0:
                    part = tl.arange(0, PARTS)
                    parts = groups // LANES
                    at = row * parts + part
                    part_top = tl.load(part_top_ptr + at, mask=part < parts, other=float("-inf"))
                    part_mass = tl.load(part_mass_ptr + at, mask=part < parts, other=0.0)
                    total = tl.sum(part_mass * tl.exp(part_top - top), 0)
                room = row * (ROOM + FEW)
                last = last_place(
                    logits_ptr + row * stride, vocab, key_of(maxima), least, top, k, p, total,
                    group_ptr + row * groups, number_ptr + room, id_ptr + room,
                    GROUPS, GROUP, LANES, STEP, AIM, ROOM, FEW, BLOCK,
                )  # fmt: skip
    tl.store(last_ptr + row, last)


@triton.jit
def _write_kernel(
    logits_ptr, maximum_ptr, last_ptr, stride, vocab, GROUP: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr
):
    """Per part of a row: minus infinity after the last place."""
    start_next(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, LANES)
    ids = (part * GROUP + tl.arange(0, GROUP))[:, None] * LANES + lane[None, :]
    at = logits_ptr + row * stride + ids
    wait_previous(PDL)
    last = tl.load(last_ptr + row)
    if last != ALL:
        maxima = tl.load(maximum_ptr + (row * tl.num_programs(0) + part) * LANES + lane)
        last_key = (last >> 32).to(tl.int32)
        last_id = 0x7FFFFFFF - (last & 0x7FFFFFFF).to(tl.int32)
        x = tl.load(at, mask=(ids < vocab) & (key_of(maxima) >= last_key)[None, :], other=float("-inf"))
        key = key_of(x)
        kept = (key > last_key) | ((key == last_key) & (ids <= last_id))
        # Stores of what stays, too, are vectors.
        tl.store(at, tl.where(kept, x, float("-inf")), mask=ids < vocab)


def truncate_logits(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """In place, unless the rows of `logits` are strided within."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    if top_k is None or top_p is None:
        top_k = top_p = None
    rows, vocab = logits.shape
    if not rows:
        return logits
    # Nothing here depends on the number of rows, so that what is kept of one does not depend on its neighbours.
    group = max(GROUP, triton.next_power_of_2(triton.cdiv(vocab, MOST_GROUPS)))
    parts = triton.cdiv(vocab, group * LANES)
    groups = parts * LANES
    maximum, found = (torch.empty(rows, groups, dtype=d, device=logits.device) for d in (torch.float32, torch.int32))
    part_top, part_mass = (torch.empty(rows, parts, device=logits.device) for _ in range(2))
    number, ids = (torch.empty(rows, ROOM + FEW, dtype=d, device=logits.device) for d in (torch.float32, torch.int32))
    last = torch.empty(rows, dtype=torch.int64, device=logits.device)
    given = (top_k is not None) + 2 * (min_p is not None)
    # What is not given is not read, but is of its type.
    settings = (
        found if top_k is None else top_k,
        part_top if top_p is None else top_p,
        part_top if min_p is None else min_p,
    )
    strides = [setting.stride(0) for setting in settings]
    shape = {"GROUP": group, "LANES": LANES}
    _maxima_kernel[(parts, rows)](
        logits, *settings, maximum, part_top, part_mass, logits.stride(0), given, *strides, vocab,
        **shape, num_warps=2, **options(logits),
    )  # fmt: skip
    _search_kernel[(rows,)](
        logits, *settings, maximum, part_top, part_mass, found, number, ids, last,
        logits.stride(0), given, *strides, vocab, groups,
        PARTS=triton.next_power_of_2(parts), GROUPS=triton.next_power_of_2(groups), **shape,
        STEP=max(STEP * GROUP // group, 1), AIM=min(AIM, groups // 2), ROOM=ROOM, FEW=FEW, BLOCK=BLOCK,
        num_warps=16, **options(logits),
    )  # fmt: skip
    _write_kernel[(parts, rows)](
        logits, maximum, last, logits.stride(0), vocab, **shape, num_warps=4, **options(logits)
    )  # fmt: skip
    return logits
