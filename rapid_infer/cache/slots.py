"""Where in a cache a token's entry lies, for arrays; for kernels see `ops/providers/triton/step/slots.py`."""

from __future__ import annotations

from typing import Any, TypeVar

Array = TypeVar("Array")
"""Of numpy or of torch."""


def slots_of(block_tables: Array, rows: Any, positions: Any, block_size: int) -> Array:
    """The slot of each position of each row: entry `slot % block_size` of block `slot // block_size`.

    block_tables  `[..., table_rows, max_blocks]` int32
    rows, positions  int64, of one shape or broadcast
    returns       `[..., *positions.shape]` int64
    """
    tables: Any = block_tables
    columns = positions // block_size
    # Block c of a row whose blocks are numbered by column would put each position at a slot of its own number. Written
    # so, all of it is in the dtype of positions: slots may exceed 32 bits, which the table's entries have.
    slots: Array = positions + (tables[..., rows, columns] - columns) * block_size
    return slots
