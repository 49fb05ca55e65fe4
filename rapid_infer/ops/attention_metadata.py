"""Where the tokens of a step stand in their sequences and pages: what attention needs besides q, and the same for all
layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class AttentionMetadata:
    """One cache group's view of a step with R rows and T tokens.

    The first `num_decodes` rows have one token each, the others more. In a CUDA graph of a mixed step only the device
    knows that number, `decodes`; num_decodes is then R, and rows at the end may have no token at all.

    block_table    `[table_rows, max_blocks]` int32: the group's whole table
    rows           `[R]` int64: which rows of the table take part
    query_start    `[R + 1]` int32: row i owns tokens `query_start[i] : query_start[i + 1]`
    seq_lens       `[R]` int32: keys of each row, this step's included
    slots          `[T]` int64: where each token's key and value go
    decodes        `[1]` int32, or None
    max_query_len, max_seq_len   upper bounds known on the host; in a CUDA graph the largest there can be
    max_context_len  upper bound of what rows with several tokens held before this step; None: not known
    plans          what a provider derives once per step and reads in every layer, by a key of its own
    """

    block_table: Tensor
    rows: Tensor
    query_start: Tensor
    seq_lens: Tensor
    slots: Tensor
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    decodes: Tensor | None = None
    max_context_len: int | None = None
    plans: dict[Any, Any] = field(default_factory=dict)
