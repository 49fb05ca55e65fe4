"""The plan of one step: a delta against the device's state, plain data with per-row values as typed arrays.

A plan is all a worker gets: it names rows, never requests, and holds no Python object per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows that start with this step; all arrays `[new]`. `computed`: tokens already in the cache."""

    rows: I32
    computed: I32
    temperature: F32
    top_k: I32
    top_p: F32
    seed: I64
    sample_index: I32


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """For one cache group: `block_table[rows[i], columns[i]] = blocks[i]`."""

    rows: I32
    columns: I32
    blocks: I32


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """What the finish part must do for some row of the step; with everything False it is an argmax."""

    random: bool = False
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """R rows with T tokens in all; single-token rows come first.

    rows        [R]    which rows, in batch order
    query_lens  [R]    tokens of each
    tokens      [T]    ids the host knows, -1 where the device's last token of that row is meant; empty: all are
    sampled     [S]    indices into `rows` of those that get a new token
    max_seq_len        upper bound of every row's length after this step
    """

    step: int
    rows: I32
    query_lens: I32
    tokens: I32
    sampled: I32
    new_rows: NewRows | None
    new_blocks: tuple[NewBlocks, ...]
    features: SamplingFeatures
    max_query_len: int
    max_seq_len: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back, in the order of `StepPlan.sampled`: the tokens, and which rows had non-finite logits."""

    token_ids: I32
    failed: NDArray[np.bool_]
