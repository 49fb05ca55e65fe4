"""Decode rows whose tables begin with the same blocks: which of them make a group, and what comes out."""

import random
from typing import Any

import pytest
import torch
from attention_chunks import with_options
from torch import Tensor

pytest.importorskip("triton")

from rapid_infer.ops import OPS
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.ops.providers.triton.attention import groups as attention_groups
from rapid_infer.ops.providers.triton.attention import plan as attention_plan
from rapid_infer.ops.providers.triton.attention import prefill_config as attention_prefill_config
from rapid_infer.ops.providers.triton.attention import shared as attention_shared
from rapid_infer.ops.providers.triton.attention import tile as attention_tile
from rapid_infer.ops.providers.triton.attention.paged_attention import paged_attention
from rapid_infer.ops.providers.triton.attention.plan import DecodePlan
from rapid_infer.testing.op_cases.attention import make_metadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = OPS["paged_attention"].reference
OPTIONS: list[dict[str, Any]] = [
    {},
    {"soft_cap": 2.0},
    {"sinks": True},
    {"window": 20},
    {"soft_cap": 2.0, "sinks": True},
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys, groups from 2 blocks on, items of a few rows, and more slices than items."""
    torch.manual_seed(0)
    random.seed(0)
    monkeypatch.setattr(attention_tile, "MAX_TILE", 16)
    monkeypatch.setattr(attention_prefill_config, "FP32_QUERIES", 16)
    for name, value in {
        "MIN_BLOCKS": 2,
        "MIN_SAVED": 2,
        "MIN_QUOTA": 1,
        "COMPARED_AT_ONCE": 128,
    }.items():
        monkeypatch.setattr(attention_groups, name, value)
    monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", 3)


def make_case(
    seq_lens: list[int],
    groups: list[tuple[int, int, int]],
    query_lens: list[int] | None = None,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 32,
    size: int = 16,
) -> dict[str, Any]:
    """Arguments for the op; of each group (first row, end, n) the rows have the same first n blocks."""
    query_lens = query_lens or [1] * len(seq_lens)
    metadata, blocks = make_metadata(seq_lens, query_lens, size, DEVICE)
    share(metadata, groups)
    return {
        "q": torch.randn(sum(query_lens), heads, dim, device=DEVICE),
        "k_cache": torch.randn(blocks, size, kv_heads, dim, device=DEVICE),
        "v_cache": torch.randn(blocks, size, kv_heads, dim, device=DEVICE),
        "metadata": metadata,
        "params": AttentionParams(dim**-0.5, return_lse=True),
    }


def share(metadata: AttentionMetadata, groups: list[tuple[int, int, int]]) -> None:
    for first, end, n in groups:
        metadata.block_table[first:end, :n] = metadata.block_table[first, :n].clone()


def check(case: dict[str, Any], **options: Any) -> None:
    case = with_options(case, **options)
    for got, expected in zip(paged_attention(**case), REFERENCE(**case)):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def shared(case: dict[str, Any]) -> list[int]:
    """Blocks that each row shares, after a call."""
    [plan] = (plan for plan in case["metadata"].plans.values() if isinstance(plan, DecodePlan))
    tiles: Tensor = plan.shared.rows[:, 0]
    return (tiles * 16 // case["k_cache"].shape[1]).tolist()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_groups_and_rows_in_none(options: dict[str, Any]) -> None:
    case = make_case([70, 100, 90, 110, 105, 98, 120, 97, 40], [(1, 3, 4), (4, 8, 6)])
    check(case, **options)
    if "window" not in options:
        assert shared(case) == [0, 4, 4, 0, 6, 6, 6, 6, 0]


@pytest.mark.parametrize(
    "own", [1, 16, 17, *(pytest.param(own, marks=pytest.mark.slow) for own in (2, 15, 31, 32, 33))]
)
def test_lengths_around_the_ends_of_blocks(own: int) -> None:
    """A row's last block is never shared, so that a row always has keys of its own."""
    case = make_case([48 + own, 49, 81], [(0, 3, 5 if own > 16 else 4)])
    check(case)
    assert shared(case) == [3] * 3
    assert shared_of([48, 48, 64], 4) == [2] * 3
    assert shared_of([32, 33, 64], 4) == [0, 2, 2]


def shared_of(seq_lens: list[int], blocks: int) -> list[int]:
    case = make_case(seq_lens, [(0, len(seq_lens), blocks)])
    check(case)
    return shared(case)


@pytest.mark.parametrize("queries", [16, *(pytest.param(queries, marks=pytest.mark.slow) for queries in (64, 128))])
@pytest.mark.parametrize("programs", [1, 3, 20])
def test_all_rows_in_one_group(queries: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_shared, "FP32_QUERIES", queries)
    monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", programs)
    case = make_case([130 + 3 * i for i in range(23)], [(0, 23, 8)])
    check(case, sinks=True)
    assert shared(case) == [8] * 23


@pytest.mark.parametrize("quota", [1, 4])
@pytest.mark.parametrize("item_cost", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("programs", [1, 4, 9])
def test_items_and_rows_in_many_slices(
    quota: int, item_cost: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_groups, "MIN_QUOTA", quota)
    monkeypatch.setattr(attention_groups, "ITEM_COST", item_cost)
    monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", programs)
    check(make_case([200, 170, 300, 280, 290], [(0, 2, 9), (2, 5, 14)], heads=3, kv_heads=1))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size"),
    [(2, 2, 16, 64), (8, 1, 80, 64), (10, 2, 16, 16), (16, 1, 24, 16), (6, 2, 24, 20), (5, 5, 32, 8), (4, 4, 16, 128)],
)
def test_shapes(heads: int, kv_heads: int, dim: int, size: int) -> None:
    """Where blocks are not whole tiles, or a tile of queries holds one row, each row reads its own."""
    n = 3 * size + 5
    case = make_case([n, n + 9, n - 1, n + size], [(0, 4, 3)], None, heads, kv_heads, dim, size)
    check(case)
    [plan] = (plan for plan in case["metadata"].plans.values() if isinstance(plan, DecodePlan))
    assert (plan.shared is None) == (size % 16 > 0 or heads // kv_heads > 8)


def test_groups_come_and_go_with_the_same_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a CUDA graph: the plan is made anew in every step, in the memory of the last."""
    case = make_case([100, 130, 120, 110, 140, 150], [])
    metadata = case["metadata"]
    alone = metadata.block_table.clone()
    buffers: list[Any] = []

    def reuse(*shape: Any) -> Any:
        if not buffers:
            buffers.append(make(*shape))
        return buffers[0]

    make = attention_plan.empty_shared_plan
    monkeypatch.setattr(attention_plan, "empty_shared_plan", reuse)
    for groups, expected in (
        ([(0, 2, 4)], [4, 4, 0, 0, 0, 0]),
        ([(0, 4, 4)], [4, 4, 4, 4, 0, 0]),
        ([(0, 6, 5)], [5, 5, 5, 5, 5, 5]),
        ([], [0] * 6),
        ([(1, 3, 5), (3, 6, 6)], [0, 5, 5, 6, 6, 6]),
    ):
        metadata.block_table.copy_(alone)
        share(metadata, groups)
        metadata.plans.clear()
        check(case)
        assert shared(case) == expected
        metadata.seq_lens += 1


def test_a_row_may_end_before_the_others_stop_sharing() -> None:
    case = make_case([200, 190, 40, 195, 20], [(0, 5, 11)])
    check(case)
    # The one in the middle has little to share, and would make the first two share as little.
    assert shared(case) == [11, 11, 2, 2, 0]


def test_a_little_in_common_does_not_join_groups() -> None:
    case = make_case([200] * 7, [(0, 7, 3), (0, 3, 9), (3, 7, 12)])
    check(case)
    assert shared(case) == [9] * 3 + [12] * 4


def test_too_little_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_groups, "MIN_SAVED", 11)
    assert shared_of([100, 100, 100], 5) == [0] * 3
    assert shared_of([100, 100, 100], 6) == [6] * 3


def test_blocks_that_are_nobodys_are_not_shared() -> None:
    case = make_case([100, 120, 110], [(0, 3, 5)])
    case["metadata"].block_table[:, 3] = 0
    check(case)
    assert shared(case) == [3] * 3


@pytest.mark.parametrize("decodes", [0, 1, 3])
def test_number_of_decode_rows_on_the_device(decodes: int) -> None:
    case = make_case([100, 120, 110, 130, 125], [(0, 5, 5)])
    case["metadata"].decodes = torch.tensor([decodes], dtype=torch.int32, device=DEVICE)
    got, expected = paged_attention(**case), REFERENCE(**case)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a[:decodes], b[:decodes], atol=2e-5, rtol=2e-5)
    assert shared(case) == ([5] * decodes if decodes > 1 else [0] * decodes) + [0] * (5 - decodes)


def test_padding_rows_share_nothing() -> None:
    case = make_case([100, 120, 110, 100, 100], [(0, 3, 5)])
    metadata = case["metadata"]
    metadata.seq_lens[3:] = 0
    metadata.block_table[3:] = 1 << 30
    out, _ = paged_attention(**case)
    assert shared(case) == [5, 5, 5, 0, 0]
    assert not out[3:].any()
    metadata.block_table[3:] = 0
    torch.testing.assert_close(out[:3], REFERENCE(**case)[0][:3], atol=2e-5, rtol=2e-5)


def test_rows_of_the_table_in_any_order_and_longer_queries_behind() -> None:
    case = make_case([90, 100, 95, 110, 97, 93], [(0, 6, 5)], [1, 1, 1, 1, 9, 30])
    metadata = case["metadata"]
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=DEVICE)
    metadata.block_table[order] = metadata.block_table.clone()
    metadata.rows = order
    check(case, sinks=True)
    assert shared(case) == [5] * 4


@pytest.mark.parametrize("groups", [[], [(0, 5, 4)]], ids=str)
def test_no_bit_changes_where_nothing_is_shared(
    groups: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_groups, "MIN_SAVED", 100)
    case = make_case([100, 320, 110, 130, 125], groups)
    with_sharing = paged_attention(**case)
    assert shared(case) == [0] * 5
    monkeypatch.setattr(attention_shared, "SHARING", False)
    case["metadata"].plans.clear()
    assert all(torch.equal(a, b) for a, b in zip(with_sharing, paged_attention(**case)))
    [plan] = (plan for plan in case["metadata"].plans.values() if isinstance(plan, DecodePlan))
    assert plan.shared is None


def test_layers_share_a_plan() -> None:
    case = make_case([100, 120, 110], [(0, 3, 5)])
    first, second = paged_attention(**case), paged_attention(**case)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert len(case["metadata"].plans) == 1
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes(dtype: torch.dtype) -> None:
    case = make_case([100, 120, 110, 90], [(0, 3, 5)])
    tensors = {name: case[name].to(dtype) for name in ("q", "k_cache", "v_cache")}
    out, _ = paged_attention(**{**case, **tensors})
    expected, _ = REFERENCE(**{**case, **{name: x.float() for name, x in tensors.items()}})
    assert shared(case) == [5, 5, 5, 0]
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_groups(seed: int) -> None:
    random.seed(seed)
    groups, row = [], 0
    while row < 30:
        size = random.choice([1, 1, 2, 5, 12])
        groups.append((row, min(row + size, 30), random.randint(0, 9)))
        row += size
    check(make_case([random.randint(150, 220) for _ in range(30)], groups, heads=4, kv_heads=1), sinks=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_groups_whose_rows_do_not_stand_side_by_side(seed: int) -> None:
    """Two groups of ten and seven rows among four rows in none, in any order."""
    random.seed(seed)
    member = [0] * 10 + [1] * 7 + [-1] * 4
    random.shuffle(member)
    case = make_case([110 + 5 * i for i in range(21)], [])
    table, blocks = case["metadata"].block_table, {0: 6, 1: 5}
    for group, n in blocks.items():
        rows = [row for row, of in enumerate(member) if of == group]
        table[rows, :n] = table[rows[0], :n].clone()
    check(case, sinks=True)
    assert shared(case) == [blocks.get(group, 0) for group in member]
