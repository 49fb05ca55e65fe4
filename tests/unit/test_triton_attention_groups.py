"""The groups and items of the decode plan against a plain model of them, on random block tables."""

import random
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention import groups as attention_groups
from rapid_infer.ops.providers.triton.attention import plan as attention_plan
from rapid_infer.ops.providers.triton.attention.groups import SharedPlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 16
MIN_BLOCKS = 2
MIN_SAVED = 3


def random_step(rows: int, columns: int, decodes: int) -> AttentionMetadata:
    """Most rows begin as the one before; some tables have holes, and some rows are short."""
    table = torch.randint(1, 10000, (rows + 2, columns), dtype=torch.int32)
    order = torch.randperm(rows + 2)[:rows]
    for before, row in pairwise(order.tolist()):
        if random.random() < 0.75:
            n = random.choice([columns, columns // 2, random.randint(0, columns)])
            table[row, :n] = table[before, :n]
    if random.random() < 0.2:
        table[:, random.randrange(columns)] = 0
    longest = SIZE * columns
    lengths = [random.randint(0, longest) if random.random() < 0.3 else longest - i % 20 for i in range(rows)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    count = torch.tensor([decodes], dtype=torch.int32, device=DEVICE)
    unused = seq_lens
    return AttentionMetadata(table.to(DEVICE), order.to(DEVICE), unused, seq_lens, unused, 1, longest, rows, count)


def expected_tiles(metadata: AttentionMetadata, per_block: int) -> list[int]:
    table, lengths = metadata.block_table[metadata.rows].tolist(), metadata.seq_lens.tolist()
    assert metadata.decodes is not None
    equal = [0] * len(table)

    def leading(i: int) -> tuple[int, int]:
        whole = i < decodes and (lengths[i] - 1) // SIZE >= MIN_BLOCKS
        return (table[i][MIN_BLOCKS - 1] if whole else 0) or (1 << 30) + i, i

    decodes = int(metadata.decodes)
    order = sorted(range(len(table)), key=leading)
    table, lengths = [table[i] for i in order], [lengths[i] for i in order]
    for i in range(1, len(table)):
        limit = max(min(lengths[i - 1 : i + 1]) - 1, 0) // SIZE
        if max(order[i - 1 : i + 1]) >= decodes:
            continue
        same = [a == b != 0 for a, b in zip(table[i - 1][:limit], table[i])]
        n = [*same, False].index(False)
        equal[i] = n if n >= MIN_BLOCKS else 0
    near = [max(a, b) for a, b in zip([0, *equal], [*equal[1:], 0])]
    equal = [0 if 2 * n < other else n for n, other in zip(equal, near)]
    starts = [i for i, n in enumerate(equal) if n == 0] + [len(equal)]
    tiles, saved = [0] * len(equal), 0
    for first, end in pairwise(starts):
        if end - first > 1:
            tiles[first:end] = [min(equal[first + 1 : end]) * per_block] * (end - first)
            saved += sum(tiles[first + 1 : end])
    by_row = dict(zip(order, tiles))
    return [by_row[i] if saved >= MIN_SAVED else 0 for i in range(len(equal))]


def check_items(plan: SharedPlan, tiles: list[int]) -> None:
    """Walks through all slices: no place is used twice, and every row has all its tiles, in order."""
    quota, slice_item, first = int(plan.quota), plan.slice_item.tolist(), plan.item_first.tolist()
    places: list[int] = []
    found: dict[int, list[tuple[int, int, int]]] = {}
    order = plan.order.tolist()
    assert sorted(order) == list(range(len(tiles)))
    for slice in range(plan.slices):
        for item in range(slice_item[slice], slice_item[slice + 1] + 1):
            start = first[item] + attention_groups.ITEM_COST
            begin, end = max(start, slice * quota) - start, min(first[item + 1], (slice + 1) * quota) - start
            if begin < end:
                first_place, count, _, _ = plan.items[item].tolist()
                assert count <= plan.pack
                for at in range(first_place, first_place + count):
                    places.append(len(tiles) + at + slice * plan.pack)
                    found.setdefault(order[at], []).append((slice, begin, end))
    assert len(set(places)) == len(places)
    assert max(places) < len(plan.partial)
    assert sorted(found) == [row for row, n in enumerate(tiles) if n]
    for row, parts in found.items():
        _, item = plan.rows[row].tolist()
        first_place, count, first_slice, slices = plan.items[item].tolist()
        assert row in order[first_place : first_place + count]
        assert not plan.arrived[item].any()
        assert [slice for slice, _, _ in parts] == list(range(first_slice, first_slice + slices))
        assert (parts[0][1], parts[-1][2]) == (0, tiles[row])
        assert all(a[2] == b[1] for a, b in pairwise(parts))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_against_a_plain_model(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(attention_groups, "MIN_BLOCKS", MIN_BLOCKS)
    monkeypatch.setattr(attention_groups, "MIN_SAVED", MIN_SAVED)
    with_groups = 0
    for _ in range(12):
        for name, choices in {
            "MIN_QUOTA": (1, 3),
            "ITEM_COST": (0, 1, 2),
            "COMPARED_AT_ONCE": (32, 128, 4096),
        }.items():
            monkeypatch.setattr(attention_groups, name, random.choice(choices))
        monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", random.choice((1, 2, 5)))
        rows, tile, pack = random.choice([2, 3, 9, 17, 31, 32]), random.choice([8, 16]), random.choice([2, 4, 32])
        metadata = random_step(rows, random.choice([4, 12, 20]), random.choice([rows, rows, rows - 2]))
        plan = attention_plan.decode_plan(metadata, 1, 1, 16, tile, None, SIZE, pack)
        assert plan.shared is not None
        tiles = expected_tiles(metadata, SIZE // tile)
        assert plan.shared.rows[:, 0].tolist() == tiles
        assert (int(plan.shared.quota) > 0) == any(tiles)
        if any(tiles):
            with_groups += 1
            check_items(plan.shared, tiles)
        own = [max(-(-n // tile) - shared, 1) for n, shared in zip(metadata.seq_lens.tolist(), tiles)]
        assert metadata.decodes is not None
        decodes = int(metadata.decodes)
        assert int(plan.first[-1]) == sum(own[:decodes]) + decodes * plan.row_cost
    assert with_groups > 3
