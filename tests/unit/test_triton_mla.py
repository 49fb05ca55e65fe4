"""Triton's MLA beyond the generic test: padding rows, slots nobody wrote, strides, plans used again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from rapid_infer.ops import OPS
from rapid_infer.ops.providers.triton.attention import plan as attention_plan
from rapid_infer.ops.providers.triton.mla import context as context_module
from rapid_infer.ops.providers.triton.mla import decode as decode_module
from rapid_infer.ops.providers.triton.mla import prefill as prefill_module
from rapid_infer.ops.providers.triton.mla.context import mla_context
from rapid_infer.ops.providers.triton.mla.decode import mla_decode
from rapid_infer.ops.providers.triton.mla.kv_write import mla_kv_write
from rapid_infer.ops.providers.triton.mla.prefill import mla_prefill
from rapid_infer.ops.providers.triton.mla.tile import mla_shape
from rapid_infer.testing.op_cases.attention import in_mixed_graph, make_metadata, slots_only

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_case(seq_lens: list[int], query_lens: list[int], heads: int = 6, rank: int = 32, size: int = 16) -> Any:
    """Arguments for decode and, with `lse`, context; NaN wherever the cache holds no key of a row.

    The cache is a layer of several.
    """
    metadata, blocks = make_metadata(seq_lens, query_lens, size, DEVICE)
    cache = torch.full((3, blocks, size, rank + 8), math.nan, device=DEVICE)[1]
    for row, n in enumerate(seq_lens):
        key = torch.arange(n, device=DEVICE)
        cache[metadata.block_table[row, key // size].long(), key % size] = torch.randn(n, rank + 8, device=DEVICE)
    q = torch.randn(sum(query_lens), heads, rank + 8, device=DEVICE)
    out = torch.randn(sum(query_lens), heads, rank, device=DEVICE)
    return {"q": q, "cache": cache, "metadata": metadata, "scale": 0.2, "rank": rank, "out": out}


def attend(op: Any, case: Any, *names: str) -> list[Tensor]:
    """What `op` makes of the arguments `names`, on copies of them."""
    copies = {name: case[name].clone() for name in names}
    op(**{**case, **copies})
    return list(copies.values())


def check_decode(case: Any) -> None:
    got, expected = (attend(op, case, "out") for op in (mla_decode, OPS["mla_decode"].reference))
    torch.testing.assert_close(got, expected, **CLOSE)


def check_context(case: Any) -> None:
    case = {**case, "lse": torch.randn(case["q"].shape[:2], device=DEVICE)}
    got, expected = (attend(op, case, "out", "lse") for op in (mla_context, OPS["mla_context"].reference))
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("seq_lens", [[300, 1, 16, 17], [90, 90]])
def test_decode_lengths_and_block_sizes(seq_lens: list[int], size: int) -> None:
    check_decode(make_case(seq_lens, [1] * len(seq_lens), size=size))


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [([40, 3, 50, 33], [1, 3, 18, 33]), ([64, 31, 96], [32, 31, 64]), ([17], [2])]
)
def test_context_lengths_and_block_sizes(seq_lens: list[int], query_lens: list[int], size: int) -> None:
    check_context(make_case(seq_lens, query_lens, size=size))


@pytest.mark.parametrize(("programs", "part_cost"), [(1, 0), (3, 0), (20, 0), (20, 1), (20, 20)])
def test_rows_spread_over_slices(programs: int, part_cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", programs)
    monkeypatch.setattr(decode_module, "PART_COST", part_cost)
    check_decode(make_case([200, 5, 90], [1, 1, 1], heads=20))


@pytest.mark.parametrize("queries", [1, 4, 64])
def test_tiles_of_tokens_before_a_context(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than the heads of one token, some tokens, and more than a row has."""
    monkeypatch.setattr(context_module, "FP32_QUERIES", queries)
    check_context(make_case([40, 7], [9, 7], heads=4))


MIXTURES = [[9, 40], [1, 9, 40], [1, 1, 21, 2], [1, 1, 1], [2] * 4]


@pytest.mark.parametrize("padding", [(0, 0), (3, 0), (2, 20)])
@pytest.mark.parametrize("query_lens", MIXTURES, ids=str)
def test_rows_that_only_the_device_knows(query_lens: list[int], padding: tuple[int, int]) -> None:
    """As in a CUDA graph of a mixed step; queries of padding are NaN, and nothing is written for them."""
    case = make_case([50, 60, 40, 33][: len(query_lens)], query_lens, heads=4)
    case["metadata"] = in_mixed_graph(case["metadata"], *padding)
    case["q"], case["out"] = (F.pad(case[name], (0, 0, 0, 0, 0, padding[1]), value=math.nan) for name in ("q", "out"))
    case["out"].nan_to_num_(7.0)
    check_decode(case)
    check_context(case)


def test_a_step_without_context_writes_no_result() -> None:
    case = make_case([9, 3], [9, 3])
    out, lse = attend(mla_context, {**case, "lse": torch.zeros(12, 6, device=DEVICE)}, "out", "lse")
    assert torch.equal(out, case["out"])
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_padding_rows_get_zeros() -> None:
    case = make_case([9, 1, 20], [1, 1, 1])
    case["metadata"].seq_lens[1] = 0
    [got] = attend(mla_decode, case, "out")
    assert not got[1].any()
    case["metadata"].seq_lens[1] = 1
    [expected] = attend(OPS["mla_decode"].reference, case, "out")
    torch.testing.assert_close(got[[0, 2]], expected[[0, 2]], **CLOSE)


def test_layers_of_a_step_share_the_plans_and_give_the_same_bits() -> None:
    case = make_case([120, 33, 20], [1, 1, 9])
    for op, names in ((mla_decode, ["out"]), (mla_context, ["out", "lse"])):
        arguments = {**case, "lse": torch.zeros(11, 6, device=DEVICE)} if "lse" in names else case
        case["metadata"].plans.clear()
        first = attend(op, arguments, *names)
        assert len(case["metadata"].plans) == 1
        assert all(map(torch.equal, attend(op, arguments, *names), first))
        assert len(case["metadata"].plans) == 1


@pytest.mark.parametrize(("queries", "tile"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("padding", [None, (3, 6)])
@pytest.mark.parametrize("query_lens", [[1, 40, 2, 17], [1, *[4, 3] * 9]], ids=str)
def test_tiles_of_a_steps_own_tokens(
    queries: int,
    tile: int,
    with_context: bool,
    padding: tuple[int, int] | None,
    query_lens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores far apart, so that parts of very different weight are put together; queries are slices of wider rows.

    Where there is no context, `out` is NaN. Many short rows have more tiles than there are programs.
    """
    monkeypatch.setattr(prefill_module, "FP32_QUERIES", queries)
    monkeypatch.setattr(prefill_module, "FP32_TILE", tile)
    real = sum(query_lens)
    metadata, _ = make_metadata([n + 1 for n in query_lens], query_lens, 4, DEVICE)
    if padding is not None:
        metadata = in_mixed_graph(metadata, *padding)
    tokens, heads = len(metadata.slots), 3
    wide, entries = torch.randn(tokens, heads, 40, device=DEVICE), torch.randn(tokens, 24, device=DEVICE)
    kv, lse = torch.randn(tokens, heads, 32, device=DEVICE), 8 * torch.randn(tokens, heads, device=DEVICE)
    wide[real:], entries[real:], kv[real:] = math.nan, math.nan, math.nan
    lse[1:42] = -math.inf
    out = torch.randn(tokens, heads, 16, device=DEVICE)
    out[1:42] = math.nan
    arguments: dict[str, Any] = {
        "q_nope": wide[..., 3:19],
        "q_rope": wide[..., 32:],
        "kv": kv,
        "key": entries[:, 16:],
        "metadata": metadata,
        "scale": 1.5,
        "out": out,
        "context_lse": lse if with_context else None,
    }
    [got], [expected] = (attend(op, arguments, "out") for op in (mla_prefill, OPS["mla_prefill"].reference))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert not got.isnan().any()


def test_heads_are_cut_into_equal_blocks() -> None:
    cache = torch.empty(1, 64, 576)
    shapes = {heads: mla_shape(torch.empty(1, heads, 576), cache, 1.0, 512, 64) for heads in (1, 16, 64, 70, 128)}
    assert {heads: (s.head_blocks, s.group) for heads, s in shapes.items()} == {
        1: (1, 1),
        16: (1, 16),
        64: (1, 64),
        70: (2, 35),
        128: (2, 64),
    }


def test_parts_of_one_product_are_written_from_where_they_are() -> None:
    """Queries and latent are slices of one matrix, and the cache is a layer's slice of all."""
    tokens, heads, nope, rank, rope = 5, 3, 8, 32, 8
    down = torch.randn(tokens, heads * (nope + rope) + rank + rope, device=DEVICE)
    q, kv = down.split((heads * (nope + rope), rank + rope), dim=1)
    angle, weight = torch.rand(16, rope // 2, device=DEVICE), torch.rand(rank, device=DEVICE)
    table = torch.cat((angle.cos(), angle.sin()), -1)
    positions, slots = (torch.tensor(x, device=DEVICE) for x in ([3, 0, 9, 15, 4], [6, 1, 0, 7, 3]))
    caches = [torch.zeros(3, 2, 4, rank + rope, device=DEVICE) for _ in range(2)]
    queries = [torch.zeros(tokens, heads, rank + rope, device=DEVICE) for _ in range(2)]
    for fn, cache, query in zip((mla_kv_write, OPS["mla_kv_write"].reference), caches, queries):
        by_head = q.unflatten(1, (heads, nope + rope))
        fn(by_head, kv, positions, table, slots_only(slots), cache[1], weight, 1e-6, True, query)
    torch.testing.assert_close(caches[0], caches[1], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(queries[0], queries[1], atol=2e-5, rtol=2e-5)
    assert not caches[0][[0, 2]].any()
    assert not queries[0][..., :rank].any()
