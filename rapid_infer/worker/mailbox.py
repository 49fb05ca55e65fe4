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
from rapid_infer.ops.step_inputs import Letter

MOST_ENTRIES = 2**31 - 1
"""Of all block tables together: a letter has 32 bits for an index."""


def check_entries(table_shape: Sequence[int]) -> None:
    """ConfigError when a recorded step cannot number the entries of such block tables."""
    if math.prod(table_shape) > MOST_ENTRIES:
        groups, rows, blocks = table_shape
        raise ConfigError(
            f"block tables of {groups} x {rows} x {blocks} blocks have more entries than the {MOST_ENTRIES} that a "
            "recorded step can number: lower max_num_seqs or max_model_len, raise block_size, or set "
            "enforce_eager=True"
        )


class Mailbox:
    """mail, results    the rings of the ops in `step_inputs`
    step                `[1]` int64 on the device, the number of steps that are done; `sent` is the host's
    """

    def __init__(self, device: torch.device, layout: Letter, *, slots: int, table_shape: Sequence[int]) -> None:
        """`table_shape`: that of the block tables, `[groups, table_rows, max_blocks]`; the last row is padding."""
        _, self._table_rows, self._max_blocks = table_shape
        pinned = device.type == "cuda"
        self.layout = layout
        self.mail = torch.zeros(slots, layout.words, dtype=torch.int32, pin_memory=pinned)
        self.results = torch.zeros(slots, layout.max_rows, dtype=torch.int32, pin_memory=pinned)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.sent = 0
        self._mail, self._results = self.mail.numpy(), self.results.numpy()
        self.clear()

    def clear(self) -> None:
        """Letters that ask for nothing, in every slot."""
        self._mail[:, : Letter.ROWS] = 0
        self._mail[:, Letter.ROWS : self.layout.query_lens] = self._table_rows - 1

    def send_decode(self, rows: I32, padded: int, new_blocks: Sequence[NewBlocks]) -> int:
        """Write the letter of the next step, one token for each of `rows`, padded; returns its slot."""
        slot, letter = self._next()
        letter[Letter.ROWS : Letter.ROWS + len(rows)] = rows
        letter[Letter.ROWS + len(rows) : Letter.ROWS + padded] = self._table_rows - 1
        self._write_blocks(letter, new_blocks)
        return slot

    def send_mixed(self, plan: StepPlan, new_blocks: Sequence[NewBlocks]) -> int:
        """Write the letter of the next step, whatever its rows; returns its slot."""
        slot, letter = self._next()
        layout, n, total = self.layout, len(plan.rows), plan.num_tokens
        letter[1 : Letter.ROWS] = n, total, plan.num_decodes, len(plan.sampled)
        letter[Letter.ROWS : Letter.ROWS + n] = plan.rows
        letter[layout.query_lens : layout.query_lens + n] = plan.query_lens
        flags = letter[layout.sampled : layout.sampled + n]
        flags[:] = 0
        flags[plan.sampled] = 1
        letter[layout.tokens : layout.tokens + total] = plan.tokens if len(plan.tokens) else -1
        self._write_blocks(letter, new_blocks)
        return slot

    def _next(self) -> tuple[int, I32]:
        slot = self.sent % len(self._mail)
        self.sent += 1
        return slot, self._mail[slot]

    def _write_blocks(self, letter: I32, new_blocks: Sequence[NewBlocks]) -> None:
        count, updates = 0, self.layout.updates
        for group, blocks in enumerate(new_blocks):
            first, more = updates + 2 * count, len(blocks.rows)
            if more:
                table_row = group * self._table_rows + blocks.rows
                letter[first : first + 2 * more : 2] = table_row * self._max_blocks + blocks.columns
                letter[first + 1 : first + 2 * more : 2] = blocks.blocks
                count += more
        letter[Letter.NUM_UPDATES] = count

    def read(self, slot: int, count: int) -> tuple[I32, np.ndarray]:
        """(token ids, failed) of a step that is done."""
        values = self._results[slot, :count].copy()
        failed = values < 0
        values[failed] = 0
        return values, failed

    def resync(self) -> None:
        """Make the device expect the next letter, after a step that did not come to its end, or had none to write."""
        self.step.fill_(self.sent)
