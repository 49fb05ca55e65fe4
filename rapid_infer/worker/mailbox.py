"""What host and device exchange around a captured step: ring buffers in pinned memory that both access directly.

No copy is launched for either direction. A slot is used again only `slots` captured steps later, when the step that
read and wrote it has been collected: `slots` must exceed the number of steps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rapid_infer.engine.step_plan import I32, NewBlocks
from rapid_infer.ops.decode_step import mail_words


class Mailbox:
    """mail, results    the rings of `decode_inputs` and `commit_tokens`
    step                `[1]` int64 on the device, the number of captured steps that are done; `sent` is the host's
    """

    def __init__(
        self, device: torch.device, *, slots: int, max_rows: int, max_updates: int, table_shape: Sequence[int]
    ) -> None:
        """`table_shape`: that of the block tables, `[groups, table_rows, max_blocks]`; the last row is padding."""
        pinned = device.type == "cuda"
        self.max_rows, self.max_updates = max_rows, max_updates
        self.mail = torch.zeros(slots, mail_words(max_rows, max_updates), dtype=torch.int32, pin_memory=pinned)
        self.results = torch.zeros(slots, max_rows, dtype=torch.int32, pin_memory=pinned)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.sent = 0
        _, self._table_rows, self._max_blocks = table_shape
        self._mail, self._results = self.mail.numpy(), self.results.numpy()
        self._mail[:, 1 : 1 + max_rows] = self._table_rows - 1

    @property
    def slot(self) -> int:
        """That of the next step."""
        return self.sent % len(self._mail)

    def send(self, rows: I32, padded: int, new_blocks: Sequence[NewBlocks]) -> int:
        """Write the letter of the next step, for `padded` rows; returns its slot."""
        slot, n = self.slot, len(rows)
        letter = self._mail[slot]
        letter[1 : 1 + n] = rows
        letter[1 + n : 1 + padded] = self._table_rows - 1
        count = 0
        for group, blocks in enumerate(new_blocks):
            first, more = 1 + self.max_rows + 2 * count, len(blocks.rows)
            if more:
                table_row = group * self._table_rows + blocks.rows
                letter[first : first + 2 * more : 2] = table_row * self._max_blocks + blocks.columns
                letter[first + 1 : first + 2 * more : 2] = blocks.blocks
                count += more
        letter[0] = count
        self.sent += 1
        return slot

    def read(self, slot: int, count: int) -> tuple[I32, np.ndarray]:
        """(token ids, failed) of a step that is done."""
        values = self._results[slot, :count].copy()
        failed = values < 0
        values[failed] = 0
        return values, failed

    def resync(self) -> None:
        """After a step that failed to launch, in part or as a whole."""
        self.step.fill_(self.sent)
