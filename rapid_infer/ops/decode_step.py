"""Both ends of a decode step that the device runs by itself: take the host's changes and gather, then write tokens.

Host and device exchange through ring buffers in pinned memory. `step [1]` int64 on the device counts the steps; a
step's slot in a ring of n is `step % n`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops.registry import Case, op


def mail_words(max_rows: int, max_updates: int) -> int:
    """int32 words of one slot of `mail`."""
    return 1 + max_rows + 2 * max_updates


def _decode_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    size, max_updates = 4, 6
    for rows, groups, updates in (([2, 0, 3], 1, 1), ([1], 2, 3), ([4, 2, 0, 5, 5], 2, 6)):
        table_rows, columns, max_rows = 6, 7, 5
        mail = torch.zeros(3, mail_words(max_rows, max_updates), dtype=torch.int32)
        mail[1, 0] = updates
        mail[1, 1 : 1 + len(rows)] = torch.tensor(rows)
        where = torch.randperm(groups * (table_rows - 1) * columns)[:updates]
        pairs = torch.stack((where, torch.randint(1, 90, (updates,))), dim=1)
        mail[1, 1 + max_rows : 1 + max_rows + 2 * updates] = pairs.flatten()
        yield Case(
            {
                "mail": mail.to(device),
                "step": torch.tensor([4], device=device),
                "block_tables": torch.randint(1, 90, (groups, table_rows, columns), dtype=torch.int32, device=device),
                "last_token": torch.randint(0, 99, (table_rows,), device=device),
                "length": torch.tensor([0, 5, 3, 4, 27, 0], device=device),
                "rows": torch.zeros(len(rows), dtype=torch.int64, device=device),
                "max_rows": max_rows,
                "block_size": size,
            }
        )


@op(inputs=_decode_inputs, mutates=("block_tables", "rows"))
def decode_inputs(
    mail: Tensor,
    step: Tensor,
    block_tables: Tensor,
    last_token: Tensor,
    length: Tensor,
    rows: Tensor,
    max_rows: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the step's block updates, copy its row numbers to `rows` and gather the inputs of one token per row.

    mail          `[slots, mail_words]` int32: the number of updates, `max_rows` row numbers, then per update an index
                  into the flattened block_tables and the block to put there
    block_tables  `[groups, table_rows, max_blocks]` int32; the last table row is the padding row, of length 0
    last_token, length  `[table_rows]` int64
    rows          `[B]` int64, written
    returns       input_ids `[B]` int64, positions `[B]` int64, seq_lens `[B]` int32 with the new token (0 for padding
                  rows, whose keys nobody reads), slots `[groups, B]` int64
    """
    letter = mail[int(step) % len(mail)]
    updates = letter[1 + max_rows :][: 2 * int(letter[0])].view(-1, 2).to(block_tables.device)
    block_tables.view(-1)[updates[:, 0].long()] = updates[:, 1]
    rows.copy_(letter[1 : 1 + len(rows)])
    positions = length[rows]
    padding = rows == block_tables.shape[1] - 1
    seq_lens = torch.where(padding, 0, positions + 1).int()
    blocks = block_tables[:, rows, positions // block_size].long()
    return last_token[rows], positions, seq_lens, blocks * block_size + positions % block_size


def _commit(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, best in (([2, 0, 3], [1.0, float("nan"), -2.0]), ([5, 1, 5], [0.0, float("inf"), 1.0])):
        yield Case(
            {
                "rows": torch.tensor(rows, device=device),
                "tokens": torch.tensor([7, 8, 9], device=device),
                "best": torch.tensor(best, device=device),
                "last_token": torch.arange(6, device=device),
                "length": torch.tensor([4, 5, 3, 4, 27, 0], device=device),
                "results": torch.full((3, 8), 77, dtype=torch.int32, device=device),
                "step": torch.tensor([5], device=device),
            }
        )


@op(inputs=_commit, mutates=("last_token", "length", "results", "step"))
def commit_tokens(
    rows: Tensor, tokens: Tensor, best: Tensor, last_token: Tensor, length: Tensor, results: Tensor, step: Tensor
) -> None:
    """Write the step's tokens where the next step and the host find them, and advance lengths and step.

    rows     `[B]` int64; the padding row, the table's last, is left alone
    tokens   `[B]` int64
    best     `[B]` fp32: a row where it is not finite has failed; its last token becomes 0, its result -1
    results  `[slots, max_rows]` int32, written at the step's slot
    """
    failed = ~torch.isfinite(best)
    real = rows != len(last_token) - 1
    results[int(step) % len(results), : len(rows)] = tokens.where(~failed, -1).int().to(results.device)
    last_token[rows] = tokens.where(real & ~failed, last_token[rows].where(~real, 0))
    length[rows] += real.long()
    step += 1
