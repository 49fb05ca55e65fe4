"""Cases of both ends of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops.step_inputs import StepLayout
from rapid_infer.testing.op_cases.case import Case, cases


def _write_updates(entry: Tensor, layout: StepLayout, updates: int, blocks: int) -> None:
    entry[StepLayout.NUM_UPDATES] = updates
    pairs = torch.stack((torch.randperm(blocks)[:updates], torch.randint(1, 90, (updates,))), dim=1)
    entry[layout.updates : layout.updates + 2 * updates] = pairs.flatten()


def _tables(groups: int, device: str) -> dict[str, Tensor]:
    return {
        "block_tables": torch.randint(1, 90, (groups, 6, 7), dtype=torch.int32, device=device),
        "last_token": torch.randint(0, 99, (6,), device=device),
        "length": torch.tensor([0, 5, 3, 4, 20, 0], device=device),
    }


@cases
def decode_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    layout = StepLayout(5, 6, 16)
    for rows, groups, updates in (([2, 0, 3], 1, 1), ([1], 2, 3), ([4, 2, 0, 5, 5], 2, 6)):
        ring = torch.zeros(3, layout.words, dtype=torch.int32)
        ring[1, StepLayout.ROWS : StepLayout.ROWS + len(rows)] = torch.tensor(rows)
        _write_updates(ring[1], layout, updates, groups * 5 * 7)
        yield Case(
            {
                "ring": ring.to(device),
                "step": torch.tensor([4], device=device),
                **_tables(groups, device),
                "rows": torch.zeros(len(rows), dtype=torch.int64, device=device),
                "layout": layout,
                "block_size": 4,
            }
        )


@cases
def mixed_inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    layout = StepLayout(5, 6, 16)
    steps = (([2, 0, 3], [1, 3, 7], [1, 0, 1], 1), ([1], [5], [0], 2), ([4, 2, 0, 3, 1], [1] * 5, [1, 1, 0, 1, 1], 2))
    for rows, query_lens, sampled, groups in steps:
        ring = torch.zeros(3, layout.words, dtype=torch.int32)
        entry, total = ring[1], sum(query_lens)
        entry[1:5] = torch.tensor([len(rows), total, query_lens.count(1), sum(sampled)])
        for at, values in ((StepLayout.ROWS, rows), (layout.query_lens, query_lens), (layout.sampled, sampled)):
            entry[at : at + len(rows)] = torch.tensor(values)
        entry[layout.tokens : layout.tokens + total] = torch.randint(-1, 9, (total,))
        _write_updates(entry, layout, 4, groups * 5 * 7)
        yield Case(
            {
                "ring": ring.to(device),
                "step": torch.tensor([4], device=device),
                **_tables(groups, device),
                "num_tokens": 12,
                "layout": layout,
                "block_size": 4,
            }
        )


@cases
def commit_tokens(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, values in (([2, 0, 3], [1.0, float("nan"), -2.0]), ([5, 1, 5], [0.0, float("inf"), 1.0])):
        yield Case(
            {
                "rows": torch.tensor(rows, device=device),
                "tokens": torch.tensor([7, 8, 9], device=device),
                "finite_if_valid": torch.tensor(values, device=device),
                "last_token": torch.arange(6, device=device),
                "length": torch.tensor([4, 5, 3, 4, 27, 0], device=device),
                "results": torch.full((3, 8), 77, dtype=torch.int32, device=device),
                "step": torch.tensor([5], device=device),
            }
        )
