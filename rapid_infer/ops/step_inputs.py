"""Both ends of a step that the device runs by itself: gather inputs by what the host wrote, then write tokens.

Host and device exchange through ring buffers in pinned memory. `step [1]` int64 on the device counts the steps; a
step's slot in a ring of n is `step % n`, and what stands there is its entry. The last row of the device's tables is the
padding row, of length 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rapid_infer.cache.slots import slots_of
from rapid_infer.ops.registry import op


@dataclass(frozen=True)
class StepLayout:
    """Where what stands in a step's entry of the ring, int32 words. `StepLayout.NUM_*`: the numbers it begins with.

    rows, query_lens, sampled   per row: its number, its tokens, whether it gets a new one
    updates                     pairs of an index into the flattened block tables and the block to put there
    tokens                      ids, -1 where the row's last token is meant
    """

    max_rows: int
    max_updates: int
    max_tokens: int

    NUM_UPDATES, NUM_ROWS, NUM_TOKENS, NUM_DECODES, NUM_SAMPLED, ROWS = range(6)

    @cached_property
    def query_lens(self) -> int:
        return self.ROWS + self.max_rows

    @cached_property
    def sampled(self) -> int:
        return self.query_lens + self.max_rows

    @cached_property
    def updates(self) -> int:
        return self.sampled + self.max_rows

    @cached_property
    def tokens(self) -> int:
        return self.updates + 2 * self.max_updates

    @cached_property
    def words(self) -> int:
        return self.tokens + self.max_tokens


def apply_updates(entry: Tensor, layout: StepLayout, block_tables: Tensor) -> None:
    """The block updates of one entry."""
    pairs = entry[layout.updates :][: 2 * int(entry[StepLayout.NUM_UPDATES])].view(-1, 2).to(block_tables.device)
    block_tables.view(-1)[pairs[:, 0].long()] = pairs[:, 1]


@op(mutates=("block_tables", "rows"), capturable=False)
def decode_inputs(
    ring: Tensor,
    step: Tensor,
    block_tables: Tensor,
    last_token: Tensor,
    length: Tensor,
    rows: Tensor,
    layout: StepLayout,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the step's block updates, copy its row numbers to `rows` and gather the inputs of one token per row.

    ring          `[slots, layout.words]` int32, what the host writes
    block_tables  `[groups, table_rows, max_blocks]` int32
    last_token, length  `[table_rows]` int64
    rows          `[B]` int64, written
    returns       input_ids `[B]` int64, positions `[B]` int64, seq_lens `[B]` int32 with the new token (0 for padding
                  rows, whose keys nobody reads), slots `[groups, B]` int64
    """
    entry = ring[int(step) % len(ring)]
    apply_updates(entry, layout, block_tables)
    rows.copy_(entry[StepLayout.ROWS :][: len(rows)])
    positions = length[rows]
    padding = rows == block_tables.shape[1] - 1
    seq_lens = torch.where(padding, 0, positions + 1).int()
    return last_token[rows], positions, seq_lens, slots_of(block_tables, rows, positions, block_size)


class MixedInputs(NamedTuple):
    """Inputs of T tokens in R rows, padding at the end of both.

    input_ids, positions `[T]` int64, slots `[groups, T]` int64: 0 for padding; token_mask `[T]` int32: 1 for the others
    rows `[R]` int64, query_start `[R + 1]` and seq_lens `[R]` int32 with this step's tokens; padding rows have none
    decodes `[1]` int32: how many rows, the first, have one token
    last `[R]` int64: the last token of each sampled row; sampled_rows `[R]` int64, the padding row at the end;
    sampled_lens `[R]` int32
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    token_mask: Tensor
    rows: Tensor
    query_start: Tensor
    seq_lens: Tensor
    decodes: Tensor
    last: Tensor
    sampled_rows: Tensor
    sampled_lens: Tensor


@op(mutates=("block_tables", "length"), capturable=False)
def mixed_inputs(
    ring: Tensor,
    step: Tensor,
    block_tables: Tensor,
    last_token: Tensor,
    length: Tensor,
    num_tokens: int,
    layout: StepLayout,
    block_size: int,
) -> MixedInputs:
    """Apply the step's block updates and gather the inputs of any mix of rows, padded to `num_tokens` and max_rows.

    `length` becomes what it is after the step, for sampled rows less one, which `commit_tokens` adds. Other arguments
    as of `decode_inputs`.
    """
    device = length.device
    entry = ring[int(step) % len(ring)].to(device)
    apply_updates(entry, layout, block_tables)
    max_rows, padding = layout.max_rows, block_tables.shape[1] - 1
    n, total = int(entry[StepLayout.NUM_ROWS]), int(entry[StepLayout.NUM_TOKENS])
    rows = torch.full((max_rows,), padding, device=device)
    rows[:n] = entry[StepLayout.ROWS :][:n].long()
    query_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
    query_lens[:n] = entry[layout.query_lens :][:n]
    query_start = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
    query_start[1:] = query_lens.cumsum(0)
    seq_lens = (length[rows] + query_lens).int()
    sampled = torch.zeros(max_rows, dtype=torch.bool, device=device)
    sampled[:n] = entry[layout.sampled :][:n] > 0
    length[rows[:n]] = (seq_lens - sampled.int())[:n].long()
    row_of = torch.repeat_interleave(torch.arange(max_rows, device=device), query_lens.long())
    token = torch.arange(total, device=device)
    input_ids, positions = (torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in range(2))
    positions[:total] = (seq_lens[row_of] - query_start[row_of + 1] + token).long()
    known = entry[layout.tokens :][:total].long()
    input_ids[:total] = known.where(known >= 0, last_token[rows[row_of]])
    slots = torch.zeros(len(block_tables), num_tokens, dtype=torch.int64, device=device)
    slots[:, :total] = slots_of(block_tables, rows[row_of], positions[:total], block_size)
    order = torch.cat((torch.nonzero(sampled), torch.nonzero(~sampled))).flatten()
    chosen = torch.arange(max_rows, device=device) < sampled.sum()
    return MixedInputs(
        input_ids,
        positions,
        slots,
        (torch.arange(num_tokens, device=device) < total).int(),
        rows,
        query_start,
        seq_lens,
        entry[StepLayout.NUM_DECODES : StepLayout.NUM_DECODES + 1].clone(),
        (query_start[1:] - 1)[order].long().where(chosen, 0),
        rows[order].where(chosen, padding),
        seq_lens[order].where(chosen, 1),
    )


@op(mutates=("last_token", "length", "results", "step"), capturable=False)
def commit_tokens(
    rows: Tensor,
    tokens: Tensor,
    finite_if_valid: Tensor,
    last_token: Tensor,
    length: Tensor,
    results: Tensor,
    step: Tensor,
) -> None:
    """Write the step's tokens where the next step and the host find them, and advance lengths and step.

    rows             `[B]` int64; the padding row, the table's last, is left alone
    tokens           `[B]` int64
    finite_if_valid  `[B]` fp32: a row where it is NaN or infinite has failed; its last token becomes 0, its result -1
    results          `[slots, max_rows]` int32, written at the step's slot
    """
    failed = ~torch.isfinite(finite_if_valid)
    real = rows != len(last_token) - 1
    results[int(step) % len(results), : len(rows)] = tokens.where(~failed, -1).int().to(results.device)
    last_token[rows] = tokens.where(real & ~failed, last_token[rows].where(~real, 0))
    length[rows] += real.long()
    step += 1
