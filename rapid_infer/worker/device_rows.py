"""What the device knows of the running rows, in preallocated tensors.

Its lengths are the truth; the host plans with upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.step_plan import StepPlan
from rapid_infer.worker.row_settings import RowSettings
from rapid_infer.worker.token_state import TokenState


class DeviceRows:
    """One slot per row, and one more, `padding_row`, for rows that pad a recorded step.

    last_token    `[rows + 1]` int64: the newest token of each row, not yet computed
    length        `[rows + 1]` int64: tokens whose keys and values are in the cache
    block_tables  `[cache groups, rows + 1, max_blocks]` int32; the padding row's blocks are all 0
    """

    def __init__(
        self, device: torch.device, max_num_seqs: int, num_groups: int, max_blocks: int, vocab_size: int
    ) -> None:
        rows = max_num_seqs + 1
        self.padding_row = max_num_seqs
        self.last_token, self.length = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self.block_tables = torch.zeros(num_groups, rows, max_blocks, dtype=torch.int32, device=device)
        self.sampling = RowSettings.neutral(rows, device)
        self.tokens = TokenState(rows, vocab_size, device)

    @staticmethod
    def pack_plan(plan: StepPlan) -> list[np.ndarray]:
        """The arrays of `plan` that `apply_plan` takes, in its order."""
        arrays: list[np.ndarray] = []
        new = plan.new_rows
        if new is not None:
            arrays += [new.rows, new.computed, RowSettings.pack_rows(new)]
        for group in plan.new_blocks:
            if len(group.rows):
                arrays += [group.rows, group.columns, group.blocks]
        return arrays + TokenState.pack_changes(plan.token_lists, plan.masks)

    def apply_plan(self, plan: StepPlan, staged: Iterator[Tensor]) -> None:
        """Carry out the delta; `staged` yields the arrays of `pack_plan(plan)` on the device."""
        if plan.new_rows is not None:
            rows = next(staged).long()
            self.length[rows] = next(staged).long()
            self.sampling.write_rows(rows, next(staged))
            self.tokens.clear_rows(rows)
        for group, table in zip(plan.new_blocks, self.block_tables):
            if len(group.rows):
                rows, columns, blocks = next(staged), next(staged), next(staged)
                table[rows.long(), columns.long()] = blocks
        self.tokens.apply_changes(plan.token_lists, plan.masks, staged)
