"""Which tokens each program of a prefill kernel computes: once per step, on the device, for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

ENTRY = tl.constexpr(8)
"""Numbers of a tile, which fill one sector of memory."""
_AT_ONCE = 128
"""Tiles, and rows."""


@triton.jit(do_not_specialize=["rows_ptr", "seq_lens_ptr", "start_ptr", "decodes", "rows", "tiles"])
def _plan_kernel(
    rows_ptr, seq_lens_ptr, start_ptr, decodes_ptr, out_ptr, decodes, rows, tiles,
    TOKENS: tl.constexpr, COUNT: tl.constexpr, DECODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per row writes that row's tiles; the first of them also all that no row has."""
    start_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0) + decodes
    last = tl.load(start_ptr + rows)
    used_rows = rows
    if DECODES:
        decodes = tl.load(decodes_ptr)
        used_rows = 0
        for at in range(0, rows, COUNT):
            nth = at + tl.arange(0, COUNT)
            start = tl.load(start_ptr + nth, mask=nth < rows, other=0)
            used_rows += tl.sum(((start < last) & (nth < rows)).to(tl.int32))
    first = tl.load(start_ptr + decodes)
    used = (last - first) // TOKENS + used_rows - decodes
    if (row >= decodes) & (row < used_rows):
        # Row i's tiles start at its first token / TOKENS + i: never fewer than it needs, and at most one more.
        start = tl.load(start_ptr + row)
        stop = tl.load(start_ptr + row + 1)
        begin = (start - first) // TOKENS + row - decodes
        end = (stop - first) // TOKENS + row - decodes + 1
        keys = tl.load(seq_lens_ptr + row)
        table_row = tl.load(rows_ptr + row).to(tl.int32)
        for at in range(begin, end, COUNT):
            nth = at + tl.arange(0, COUNT)
            before = (nth - begin) * TOKENS
            # Late tiles of a row have the most keys and start first.
            out = out_ptr + (used - 1 - nth) * ENTRY
            tl.store(out, start + before, mask=nth < end)
            tl.store(out + 1, tl.minimum(stop - start - before, TOKENS), mask=nth < end)
            tl.store(out + 2, keys - (stop - start) + before, mask=nth < end)
            tl.store(out + 3, keys, mask=nth < end)
            tl.store(out + 4, table_row, mask=nth < end)
            tl.store(out + 5, before, mask=nth < end)
    if tl.program_id(0) == 0:
        tl.store(out_ptr + 6, used, mask=tiles > 0)
        tl.store(out_ptr + 7, 0, mask=tiles > 0)
        for at in range(used, tiles, COUNT):
            nth = at + tl.arange(0, COUNT)
            tl.store(out_ptr + nth * ENTRY + 1, tl.zeros([COUNT], tl.int32), mask=nth < tiles)


def prefill_plan(metadata: AttentionMetadata, tokens: int, per_tile: int) -> Tensor:
    """`[tiles, ENTRY]` int32 of a step with `tokens` tokens, made by the first layer with `per_tile` tokens in a tile.

    A tile: its first token, how many it has (0 or less: none), the first one's position, the keys of its row, where
    that is in the block table, and the row's tokens before the tile. The first tile has two more: from which tile on
    none has a token, and 0, which a kernel may count with if it leaves 0 behind. How many there are follows from
    numbers known on the host, so that a plan can be made in a CUDA graph.
    """
    key = ("triton prefill", per_tile)
    plan = metadata.plans.get(key)
    if plan is None:
        known = metadata.decodes is None
        decodes = metadata.num_decodes if known else 0
        rows, tokens = metadata.seq_lens.shape[0] - decodes, tokens - decodes
        # Rows without a token have no tile.
        tiles = tokens // per_tile + min(rows, tokens)
        plan = metadata.plans[key] = torch.empty(tiles, ENTRY.value, dtype=torch.int32, device=metadata.seq_lens.device)
        _plan_kernel[(rows,)](
            metadata.rows, metadata.seq_lens, metadata.query_start, metadata.seq_lens if known else metadata.decodes,
            plan, decodes, rows + decodes, tiles,
            TOKENS=per_tile, COUNT=_AT_ONCE, DECODES=not known, num_warps=4, **options(metadata.seq_lens),
        )  # fmt: skip
    return plan
