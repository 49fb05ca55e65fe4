"""One definition of a token's slot, for numpy and torch."""

import numpy as np
import pytest
import torch

from rapid_infer.cache.slots import slots_of

TABLES = np.random.default_rng(0).integers(1, 90, (2, 5, 7)).astype(np.int32)


@pytest.mark.parametrize("array", [np.array, torch.tensor])
@pytest.mark.parametrize("size", [1, 4])
def test_slots_of_rows_and_positions(array, size: int) -> None:
    rows, positions = [4, 0, 2, 2], [0, 6, 3, 5]
    expected = [[int(t[r, p // size]) * size + p % size for r, p in zip(rows, positions)] for t in TABLES]
    slots = slots_of(array(TABLES), array(rows), array(positions), size)
    assert slots.tolist() == expected
    assert str(slots.dtype).endswith("int64")
    one = slots_of(array(TABLES[1]), array([[4], [0]]), array(positions), size)
    assert one[1].tolist() == [int(TABLES[1, 0, p // size]) * size + p % size for p in positions]


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_slots_may_exceed_32_bits(array) -> None:
    table = np.array([[2**31 - 1]], np.int32)
    assert slots_of(array(table), array([0]), array([255]), 256).tolist() == [(2**31 - 1) * 256 + 255]
