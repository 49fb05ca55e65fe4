"""An entry says what its step needs, whatever stood in its slot of the ring before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.engine.step_plan import NewBlocks, StepPlan
from rapid_infer.errors import ConfigError
from rapid_infer.ops.step_inputs import StepLayout, decode_inputs, mixed_inputs
from rapid_infer.worker import model_runner
from rapid_infer.worker.step_ring import StepRing, check_entries

ROWS, BLOCKS, SIZE, SLOTS = 5, 6, 4, 3
LAYOUT = StepLayout(ROWS, 8, 16)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make_ring() -> StepRing:
    return StepRing(torch.device("cpu"), LAYOUT, slots=SLOTS, table_shape=(2, ROWS + 1, BLOCKS))


def tables() -> dict[str, Tensor]:
    return {
        "block_tables": torch.arange(2 * (ROWS + 1) * BLOCKS, dtype=torch.int32).view(2, ROWS + 1, BLOCKS),
        "last_token": torch.arange(10, 10 + ROWS + 1),
        "length": torch.tensor([7, 5, 0, 11, 3, 0]),
    }


def decode(ring: StepRing, rows: int) -> list[Tensor]:
    """What the device makes of the newest entry, and leaves behind."""
    kept, numbers = tables(), torch.zeros(rows, dtype=torch.int64)
    step = torch.tensor([ring.written - 1])
    found = decode_inputs(ring.inputs, step, **kept, rows=numbers, layout=LAYOUT, block_size=SIZE)
    return [*found, numbers, *kept.values()]


def mixed(ring: StepRing, step: int) -> list[Tensor]:
    kept = tables()
    found = mixed_inputs(ring.inputs, torch.tensor([step]), **kept, num_tokens=16, layout=LAYOUT, block_size=SIZE)
    return [*found, *kept.values()]


NEW = (NewBlocks(i32(3), i32(4), i32(90)), NewBlocks(i32(), i32(), i32()))
PLAN = StepPlan(
    step=0,
    rows=i32(3, 1, 2),
    query_lens=i32(1, 4, 7),
    tokens=i32(-1, *range(50, 61)),
    sampled=i32(0, 2),
    new_rows=None,
    new_blocks=NEW,
    features=SamplingFeatures(),
    max_query_len=7,
    max_seq_len=12,
    num_tokens=12,
)


@pytest.mark.parametrize("what", ["decode", "mixed"])
def test_what_a_slot_has_held_does_not_matter(what: str) -> None:
    fresh, used = make_ring(), make_ring()
    used.inputs.fill_(1)
    found = []
    for ring in (fresh, used):
        if what == "decode":
            assert ring.write_decode(i32(3, 0), 4, NEW) == 0
            found.append(decode(ring, 4))
        else:
            assert ring.write_mixed(PLAN, NEW) == 0
            found.append(mixed(ring, 0))
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got)
    if what == "decode":
        assert found[1][4].tolist() == [3, 0, ROWS, ROWS]
        assert found[1][2].tolist() == [12, 8, 0, 0]


def test_tables_with_more_entries_than_an_entry_can_number() -> None:
    """Steps are not recorded over them, and others bring their block updates in another way."""
    table: Any = SimpleNamespace(
        padding_row=1024, length=torch.zeros(1025), block_tables=torch.empty(4, 1025, 10_000_000 // 16, device="meta")
    )
    with pytest.raises(ConfigError, match=r"4 x 1025 x 625000 blocks .* lower max_num_seqs or max_model_len"):
        check_entries(table.block_tables.shape)
    assert make_layout(table).max_updates == 0
    table.block_tables = table.block_tables[:3]
    check_entries(table.block_tables.shape)
    assert make_layout(table).max_updates > 3 * 1024


def make_layout(table: Any) -> StepLayout:
    return model_runner.make_ring(table, 64, 16, 3).layout


def test_an_entry_that_asks_for_nothing_changes_nothing() -> None:
    ring = make_ring()
    untouched = list(tables().values())
    ring.written = 1
    by_rows = decode(ring, ROWS)
    assert by_rows[4].tolist() == [ROWS] * ROWS
    for kept in (by_rows, mixed(ring, 0)):
        assert all(map(torch.equal, kept[-3:], untouched))
