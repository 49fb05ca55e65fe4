"""What host and device exchange around a step: ring buffers in pinned memory that both access directly.

No copy is launched for either direction. A slot is used again only `slots` steps later, when the step that read and
wrote it has been collected: `slots` must exceed the number of steps in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rapid_infer.engine.step_plan import I32, NewBlocks, StepPlan
from rapid_infer.errors import ConfigError
from rapid_infer.ops.step_inputs import StepLayout

MAX_TABLE_ENTRIES = 2**31 - 1
"""Of all block tables together: an entry has 32 bits for an index."""


def check_entries(table_shape: Sequence[int]) -> None:
    """ConfigError when a recorded step cannot number the entries of such block tables."""
    if math.prod(table_shape) > MAX_TABLE_ENTRIES:
        groups, rows, blocks = table_shape
        raise ConfigError(
            f"block tables of {groups} x {rows} x {blocks} blocks have more entries than the {MAX_TABLE_ENTRIES} that "
            "a recorded step can number: lower max_num_seqs or max_model_len, raise block_size, or set "
            "enforce_eager=True"
        )


class StepRing:
    """inputs, results  the rings of the ops in `step_inputs`: from the host, from the device
    step             `[1]` int64 on the device, the number of steps that are done; `written` is the host's
    """

    def __init__(self, device: torch.device, layout: StepLayout, *, slots: int, table_shape: Sequence[int]) -> None:
        """`table_shape`: that of the block tables, `[groups, table_rows, max_blocks]`; the last row is padding."""
        _, self._table_rows, self._max_blocks = table_shape
        pinned = device.type == "cuda"
        self.layout = layout
        self.inputs = torch.zeros(slots, layout.words, dtype=torch.int32, pin_memory=pinned)
        self.results = torch.zeros(slots, layout.max_rows, dtype=torch.int32, pin_memory=pinned)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.written = 0
        self._inputs, self._results = self.inputs.numpy(), self.results.numpy()
        self.clear()

    def clear(self) -> None:
        """In every slot an entry that asks for nothing."""
        self._inputs[:, : StepLayout.ROWS] = 0
        self._inputs[:, StepLayout.ROWS : self.layout.query_lens] = self._table_rows - 1

    def write_decode(self, rows: I32, padded: int, new_blocks: Sequence[NewBlocks]) -> int:
        """Write the entry of the next step, one token for each of `rows`, padded; returns its slot."""
        slot, entry = self._next_entry()
        entry[StepLayout.ROWS : StepLayout.ROWS + len(rows)] = rows
        entry[StepLayout.ROWS + len(rows) : StepLayout.ROWS + padded] = self._table_rows - 1
        self._write_blocks(entry, new_blocks)
        return slot

    def write_mixed(self, plan: StepPlan, new_blocks: Sequence[NewBlocks]) -> int:
        """Write the entry of the next step, whatever its rows; returns its slot."""
        slot, entry = self._next_entry()
        layout, n, total = self.layout, len(plan.rows), plan.num_tokens
        entry[1 : StepLayout.ROWS] = n, total, plan.num_decodes, len(plan.sampled)
        entry[StepLayout.ROWS : StepLayout.ROWS + n] = plan.rows
        entry[layout.query_lens : layout.query_lens + n] = plan.query_lens
        flags = entry[layout.sampled : layout.sampled + n]
        flags[:] = 0
        flags[plan.sampled] = 1
        entry[layout.tokens : layout.tokens + total] = plan.tokens if len(plan.tokens) else -1
        self._write_blocks(entry, new_blocks)
        return slot

    def _next_entry(self) -> tuple[int, I32]:
        slot = self.written % len(self._inputs)
        self.written += 1
        return slot, self._inputs[slot]

    def _write_blocks(self, entry: I32, new_blocks: Sequence[NewBlocks]) -> None:
        count, updates = 0, self.layout.updates
        for group, blocks in enumerate(new_blocks):
            first, more = updates + 2 * count, len(blocks.rows)
            if more:
                table_row = group * self._table_rows + blocks.rows
                entry[first : first + 2 * more : 2] = table_row * self._max_blocks + blocks.columns
                entry[first + 1 : first + 2 * more : 2] = blocks.blocks
                count += more
        entry[StepLayout.NUM_UPDATES] = count

    def read_results(self, slot: int, count: int) -> tuple[I32, np.ndarray]:
        """(token ids, failed) of a step that is done."""
        values = self._results[slot, :count].copy()
        failed = values < 0
        values[failed] = 0
        return values, failed

    def resync(self) -> None:
        """Make the device expect the next entry, after a step that did not come to its end, or had none to write."""
        self.step.fill_(self.written)
