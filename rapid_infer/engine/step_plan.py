"""The plan of one step: a delta against the device's state, plain data with per-row values as typed arrays.

A plan is all a worker gets: it names rows, never requests, and holds no Python object per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rapid_infer.engine.row_fields import SamplingFeatures

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows that start with this step; all arrays `[new]`.

    computed  tokens already in the cache
    settings  of ROW_DTYPE
    """

    rows: I32
    computed: I32
    settings: NDArray[np.void]


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """For one cache group: `block_table[rows[i], columns[i]] = blocks[i]`."""

    rows: I32
    columns: I32
    blocks: I32


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Token ids of several rows, flattened: `ids[i]` belongs to row `rows[i]`, as its number `columns[i]`."""

    rows: I32
    columns: I32
    ids: I32


@dataclass(frozen=True, slots=True)
class TokenLists:
    """What new rows say of single tokens; rows that say nothing are absent.

    stop     ids that end the row, for rows with a minimum length
    bias     ids whose logits get `bias_values` added
    prompt, output   the tokens seen so far, as often as they stand there, for rows with penalties
    """

    stop: RowTokens
    bias: RowTokens
    bias_values: F32
    prompt: RowTokens
    output: RowTokens


@dataclass(frozen=True, slots=True)
class PromptLogprobsPlan:
    """Log-probabilities to return for prompt tokens: of `targets[i]` after token `tokens[i]` of the step, and of the
    `count` best.
    """

    tokens: I32
    targets: I32
    count: int


@dataclass(frozen=True, slots=True)
class RowMasks:
    """From this step on, bit `id` of `bits[i]` (`[n, ceil(vocab / 32)]`) says whether `rows[i]` may choose it."""

    rows: I32
    bits: I32


@dataclass(frozen=True, slots=True)
class StepPlan:
    """R rows with T tokens in all; single-token rows come first.

    rows        [R]    which rows, in batch order
    query_lens  [R]    tokens of each
    tokens      [T]    ids the host knows, -1 where the device's last token of that row is meant; empty: all are
    sampled     [S]    indices into `rows` of those that get a new token
    drafts      [R]    how many of a row's tokens, the last ones, are guesses that the device makes itself; None: none
    max_seq_len        upper bound of every row's length after this step
    max_context_len    upper bound of what rows with several tokens had before it; None: not known
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
    token_lists: TokenLists | None = None
    prompt_logprobs: PromptLogprobsPlan | None = None
    masks: RowMasks | None = None
    max_context_len: int | None = None
    drafts: I32 | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token, which the device knows, and gets another."""
        return self.max_query_len == 1 and len(self.sampled) == len(self.rows) and not len(self.tokens)

    @property
    def num_decodes(self) -> int:
        """Rows of one token."""
        return int(np.count_nonzero(self.query_lens == 1)) if self.max_query_len > 1 else len(self.rows)


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Per row: the chosen token first, then the best ones in order; `rank` of the chosen one, 1 for the best.

    ids `[n, 1 + count]`, values `[n, 1 + count]`, rank `[n]`.
    """

    ids: I32
    values: F32
    rank: I32


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back, in the order of `StepPlan.sampled`.

    token_ids [S, q]  new tokens of each row: those that follow its guesses, as far as these were right, and one more
    failed    [S]     which rows had non-finite logits
    counts    [S]     how many of a row's q are new tokens, at least one and at most one more than guesses; None: one
    """

    token_ids: I32
    failed: NDArray[np.bool_]
    logprobs: LogprobArrays | None = None
    prompt_logprobs: LogprobArrays | None = None
    counts: I32 | None = None
