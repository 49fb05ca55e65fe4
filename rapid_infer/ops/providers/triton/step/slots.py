"""`cache.slots` for kernels, in two halves: what the load is followed by stays as it was written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_of(tables_ptr, table_row, max_blocks, position, block_size, mask, CACHE: tl.constexpr):
    """The block, int64, of a position in a row of the flattened tables; CACHE is the load's `cache_modifier`."""
    at = tables_ptr + table_row * max_blocks + position // block_size
    return tl.load(at, mask=mask, other=0, cache_modifier=CACHE).to(tl.int64)


@triton.jit
def slot_in(block, position, block_size):
    """The slot of a position whose block is known."""
    return block * block_size + position % block_size
