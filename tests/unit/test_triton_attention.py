"""Triton's attention beyond the generic test: how decode work is cut, padding rows, strides, and plans used again."""

import itertools
import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_chunks import with_options
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from rapid_infer.ops import OPS
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.ops.providers.triton.attention import plan as attention_plan
from rapid_infer.ops.providers.triton.attention import prefill as attention_prefill
from rapid_infer.ops.providers.triton.attention import prefill_config as attention_prefill_config
from rapid_infer.ops.providers.triton.attention import prefill_plan as attention_prefill_plan
from rapid_infer.ops.providers.triton.attention import prefill_split as attention_prefill_split
from rapid_infer.ops.providers.triton.attention import tile as attention_tile
from rapid_infer.ops.providers.triton.attention.paged_attention import paged_attention
from rapid_infer.ops.providers.triton.attention.plan import decode_plan, first_tile, row_part
from rapid_infer.testing.op_cases.attention import in_mixed_graph, make_metadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = OPS["paged_attention"].reference
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 11},
    {"window": 40},
    {"soft_cap": 2.0},
    {"sinks": True},
    {"window": 20, "soft_cap": 2.0, "sinks": True},
]

# On a GPU TMA copies 16-bit types alone: see tests/gpu/test_prefill_attention.py.
TMA = [False] if DEVICE == "cuda" else [False, True]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys and of 16 queries, so that short sequences have many."""
    monkeypatch.setattr(attention_tile, "MAX_TILE", 16)
    for name in ("QUERIES", "FEW_QUERIES", "FP32_QUERIES"):
        monkeypatch.setattr(attention_prefill_config, name, 16)
    monkeypatch.setattr(attention_prefill_config, "POINTER_KEYS", 16)
    monkeypatch.setattr(attention_prefill_split, "MIN_TILES", 1)
    for module in (attention_prefill, attention_prefill_config):
        monkeypatch.setattr(module, "PAGE", 16)


def make_case(
    seq_lens: list[int], query_lens: list[int], heads: int = 6, kv_heads: int = 2, dim: int = 32, size: int = 16
) -> dict[str, Any]:
    """Arguments for the op, with NaN wherever a cache holds no key of a row."""
    metadata, blocks = make_metadata(seq_lens, query_lens, size, DEVICE)
    used = torch.zeros(blocks * size, dtype=torch.bool, device=DEVICE)
    for row, n in enumerate(seq_lens):
        key = torch.arange(n, device=DEVICE)
        used[metadata.block_table[row, key // size].long() * size + key % size] = True
    k, v = (torch.randn(blocks * size, kv_heads, dim, device=DEVICE) for _ in range(2))
    for cache in (k, v):
        cache[~used] = math.nan
    return {
        "q": torch.randn(sum(query_lens), heads, dim, device=DEVICE),
        "k_cache": k.view(blocks, size, kv_heads, dim),
        "v_cache": v.view(blocks, size, kv_heads, dim),
        "metadata": metadata,
        "params": AttentionParams(dim**-0.5, return_lse=True),
    }


def check(case: dict[str, Any], **options: Any) -> None:
    case = with_options(case, **options)
    for got, expected in zip(paged_attention(**case), REFERENCE(**case)):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@triton.jit
def _parts_kernel(
    first_ptr, slice_row_ptr, quota_ptr, seq_lens_ptr, out_ptr, window, ROWS: tl.constexpr,
    ROW_COST: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Walks through a slice as the decode kernel does; writes `[slices, rows, 4]`: tiles, first slice, slices."""
    slice = tl.program_id(0)
    quota = tl.load(quota_ptr)
    for row in range(tl.load(slice_row_ptr + slice), tl.load(slice_row_ptr + slice + 1) + 1):
        begin, end, first_slice, slices = row_part(first_ptr, row, slice, quota, ROW_COST)
        if begin < end:
            skipped = first_tile(tl.load(seq_lens_ptr + row), window, TILE, WINDOW)
            at = out_ptr + (slice * ROWS + row) * 4
            tl.store(at, skipped + begin)
            tl.store(at + 1, skipped + end)
            tl.store(at + 2, first_slice)
            tl.store(at + 3, slices)


def parts(metadata: AttentionMetadata, kv_heads: int, tile: int, window: int | None) -> Tensor:
    """`[slices, rows, 4]`, minus one where a slice has nothing of a row."""
    plan = decode_plan(metadata, kv_heads, 1, 16, tile, window)
    rows = metadata.num_decodes
    out = torch.full((plan.slices, rows, 4), -1, dtype=torch.int32, device=DEVICE)
    _parts_kernel[(plan.slices,)](
        plan.first, plan.slice_row, plan.quota, metadata.seq_lens, out, window or 0, ROWS=rows,
        ROW_COST=plan.row_cost, TILE=tile, WINDOW=window is not None,
    )  # fmt: skip
    return out.cpu()


@pytest.mark.parametrize("row_cost", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("rows_at_once", [4, 1024])
def test_slices_cover_the_keys_of_each_row_once(
    row_cost: int, window: int | None, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "ROW_COST", row_cost)
    monkeypatch.setattr(attention_plan, "_ROWS_AT_ONCE", rows_at_once)
    tile = 16
    for longest, rows, kv_heads, programs in ((40, 3, 1, 2), (300, 9, 2, 2), (20, 30, 1, 1), (900, 1, 1, 5)):
        monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", programs)
        seq_lens = [random.randint(0, longest) for _ in range(rows)]
        metadata = make_metadata([max(n, 1) for n in seq_lens], [1] * rows, 16, DEVICE)[0]
        metadata.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
        found = parts(metadata, kv_heads, tile, window)
        tiles = (found[..., 1] - found[..., 0]).clamp(min=0)
        used = tiles.sum(1) + row_cost * (tiles > 0).sum(1)
        quota = int(decode_plan(metadata, kv_heads, 1, 16, tile, window).quota)
        assert used.max() <= quota + row_cost
        assert quota <= max(math.ceil(sum(-(-max(n, 1) // tile) + row_cost for n in seq_lens) / len(found)), 2)
        for row, n in enumerate(seq_lens):
            slices = [s for s in range(len(found)) if found[s, row, 0] >= 0]
            begin = max(n - window, 0) // tile if window else 0
            assert found[slices[0], row, 0] == begin
            assert found[slices[-1], row, 1] == max(math.ceil(n / tile), begin + 1)
            assert all(b == a + 1 and found[a, row, 1] == found[b, row, 0] for a, b in pairwise(slices))
            assert found[slices, row, 2:].tolist() == [[slices[0], len(slices)]] * len(slices)


def test_where_parts_cost_slices_grow_with_the_root_of_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", 40)
    metadata = make_metadata([16 * 15, 16 * 99, 5], [1] * 3, 16, DEVICE)[0]
    for part_cost, quota in ((0, 1), (1, 10), (4, 20)):
        assert int(decode_plan(metadata, 1, 1, 16, 16, None, part_cost=part_cost).quota) == quota


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_in_several_slices(options: dict[str, Any], small: None) -> None:
    check(make_case([200, 3, 90, 77], [1] * 4), **options)


@pytest.mark.parametrize("at_once", [1, 8192])
def test_one_row_in_all_slices(at_once: int, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapid_infer.ops.providers.triton.attention.decode.COMBINED_AT_ONCE", at_once)
    check(make_case([400], [1], heads=3, kv_heads=1), sinks=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decodes_and_longer_queries_together(options: dict[str, Any], small: None) -> None:
    check(make_case([50, 9, 40, 70, 24, 33], [1, 1, 40, 21, 2, 9]), **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size"),
    [(1, 1, 16, 64), (8, 1, 80, 64), (40, 2, 16, 16), (6, 2, 24, 20), (5, 5, 32, 8), (4, 4, 16, 128)],
)
def test_shapes(heads: int, kv_heads: int, dim: int, size: int) -> None:
    check(make_case([150, 20, 60, 130], [1, 1, 30, 5], heads, kv_heads, dim, size))


def test_a_group_larger_than_a_tile_of_queries(small: None) -> None:
    check(make_case([40, 45], [1, 5], heads=24, kv_heads=1))


def test_more_rows_than_are_counted_at_once(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_prefill_plan, "_AT_ONCE", 2)
    monkeypatch.setattr(attention_plan, "_ROWS_AT_ONCE", 2)
    check(make_case([8, 30, 17, 20, 9, 35, 40, 5], [1, 1, 1, 3, 9, 35, 2, 5]))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tma", TMA)
def test_ways_to_read_keys(options: dict[str, Any], tma: bool, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = attention_prefill_config.PrefillConfig(16, 16, warps=4, stages=2, tma=tma)
    monkeypatch.setattr(attention_prefill, "choose", lambda *_: config)
    check(make_case([33, 70, 96], [1, 70, 40], size=32), **options)


def parts_of(metadata: AttentionMetadata) -> attention_prefill_split.Parts:
    return next(plan for plan in metadata.plans.values() if isinstance(plan, attention_prefill_split.Parts))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tma", TMA)
def test_few_queries_over_many_keys(
    options: dict[str, Any], tma: bool, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts with and without masks, and tiles of one part beside those of several; layers use the same room."""
    config = attention_prefill_config.PrefillConfig(16, 16, warps=4, stages=2, tma=tma)
    monkeypatch.setattr(attention_prefill, "choose", lambda *_: config)
    # In the last a part begins where masks are needed already.
    for seq_lens, query_lens in (([300], [4]), ([33, 9, 200, 24], [1, 1, 3, 2]), ([150, 140], [8, 9]), ([145], [5])):
        case = make_case(seq_lens, query_lens, heads=3, kv_heads=1, size=32)
        check(case, **options)
        parts = parts_of(case["metadata"])
        assert not parts.arrived.any()
        check(case, **options)


def test_a_step_with_work_for_all_has_no_parts(small: None) -> None:
    case = make_case([60], [60])
    check(case)
    with pytest.raises(StopIteration):
        parts_of(case["metadata"])


@triton.jit
def _find_parts_kernel(out_ptr, first_position, end, parts, window, TILE: tl.constexpr, MIN_TILES: tl.constexpr,
                       WINDOW: tl.constexpr):  # fmt: skip
    part = tl.program_id(0)
    begin, stop, count = attention_prefill_split.find_part(
        first_position, end, part, parts, window, TILE, MIN_TILES, WINDOW
    )
    tl.store(out_ptr + part * 3, begin)
    tl.store(out_ptr + part * 3 + 1, stop)
    tl.store(out_ptr + part * 3 + 2, count)


@pytest.mark.parametrize("window", [None, 50])
def test_parts_cover_the_keys_of_a_tile_once(window: int | None) -> None:
    for seen, tokens, parts, least in itertools.product((1, 16, 100, 1000), (1, 5), (1, 2, 7, 33), (1, 8)):
        out = torch.zeros(parts, 3, dtype=torch.int32, device=DEVICE)
        first_position = max(seen - tokens, 0)
        _find_parts_kernel[(parts,)](
            out, first_position, seen, parts, window or 0, TILE=16, MIN_TILES=least, WINDOW=window is not None
        )
        found = out.tolist()
        count = found[0][2]
        assert 1 <= count <= parts
        at = max(first_position - window + 1, 0) // 16 * 16 if window else 0
        for nth, (begin, stop, of_tile) in enumerate(found[:count]):
            assert of_tile == count
            assert begin == at
            assert stop > begin
            assert nth == count - 1 or stop - begin >= 16 * least
            at = stop
        assert at == seen


@pytest.mark.parametrize("query_lens", [[9, 40], [1, 9, 40], [1, 1, 21, 5], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
def test_rows_that_only_the_device_knows(query_lens: list[int], options: dict[str, Any], small: None) -> None:
    """As in a CUDA graph of a mixed step: the host has the most rows and tokens there can be."""
    case = make_case([50, 60, 40, 33][: len(query_lens)], query_lens)
    metadata, tokens, spare = case["metadata"], sum(query_lens), 3
    case = with_options(case, **options)
    expected = REFERENCE(**case)
    case["metadata"] = in_mixed_graph(metadata, spare, 20)
    case["q"] = torch.cat([case["q"], torch.full((20, 6, 32), math.nan, device=DEVICE)])
    for got, wanted in zip(paged_attention(**case), expected):
        torch.testing.assert_close(got[:tokens], wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("decodes", [0, 2, 5])
def test_every_token_is_in_one_tile(decodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_prefill_plan, "_AT_ONCE", 2)
    query_lens = [1] * decodes + [4, 1, 40, 8, 17]
    seq_lens = [n + 3 * i for i, n in enumerate(query_lens)]
    metadata = make_metadata(seq_lens, query_lens, 16, DEVICE)[0]
    metadata.num_decodes = decodes
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, -7, **options))
    plan = attention_prefill_plan.prefill_plan(metadata, sum(query_lens), 8)
    # From which tile on none has a token, and what programs count with.
    used, count = plan[0, 6:].tolist()
    assert (plan[used:, 1] <= 0).all()
    assert count == 0
    found = sorted(tile[:5] for tile in plan.tolist() if tile[1] > 0)
    start, wanted = metadata.query_start.tolist(), []
    for row in range(decodes, len(query_lens)):
        for before in range(0, query_lens[row], 8):
            count, computed = min(query_lens[row] - before, 8), seq_lens[row] - query_lens[row]
            wanted.append([start[row] + before, count, computed + before, seq_lens[row], row])
    assert found == sorted(wanted)


def test_q_may_be_a_slice() -> None:
    case = make_case([33, 20], [1, 7])
    whole = torch.randn(8, 10, 40, device=DEVICE)
    check(case, q=whole[:, 2:8, 8:])
    check(case, q=whole.transpose(1, 2)[:, :32].transpose(1, 2)[:, :6])
    check(case, q=torch.randn(32, 6, 8, device=DEVICE).permute(2, 1, 0))


def test_keys_and_values_may_lie_in_one_tensor() -> None:
    case = make_case([33, 20], [1, 7])
    cache = torch.stack((case["k_cache"], case["v_cache"]), dim=1)
    check(case, k_cache=cache[:, 0], v_cache=cache[:, 1])
    with pytest.raises(ValueError, match="same strides"):
        paged_attention(**{**case, "k_cache": cache[:, 0]})


@pytest.mark.parametrize("sinks", [None, True])
def test_rows_without_keys_get_zeros_and_disturb_no_other(sinks: bool | None, small: None) -> None:
    """As in a CUDA graph that was captured for more rows; their place in the block table is anything."""
    case = make_case([90, 1, 60, 1, 1], [1] * 5)
    metadata = case["metadata"]
    empty, full = [1, 3, 4], [0, 2]
    metadata.seq_lens[empty] = 0
    metadata.block_table[empty] = 1 << 30
    case = with_options(case, sinks=sinks)
    out, lse = paged_attention(**case)
    assert not out[empty].any()
    expected_lse = torch.full((6,), -math.inf, device=DEVICE) if sinks is None else case["params"].sinks
    torch.testing.assert_close(lse[empty], expected_lse.expand(3, 6))
    metadata.block_table[empty] = 0
    expected, expected_lse = REFERENCE(**case)
    torch.testing.assert_close(out[full], expected[full], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse[full], expected_lse[full], atol=2e-5, rtol=2e-5)


def test_layers_share_a_plan(small: None) -> None:
    """Every layer leaves the counters as it found them, and layers of other shapes have plans of their own."""
    case = make_case([200, 90, 5], [1] * 3)
    first, second = paged_attention(**case), paged_attention(**case)
    plans = case["metadata"].plans
    (plan,) = plans.values()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not plan.arrived.any()
    check(case)
    assert list(plans.values()) == [plan]
    check(case, window=40)
    assert len(plans) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_in_several_slices(dtype: torch.dtype, small: None) -> None:
    case = make_case([200, 77, 40], [1, 1, 9])
    tensors = {name: case[name].to(dtype) for name in ("q", "k_cache", "v_cache")}
    out, _ = paged_attention(**{**case, **tensors})
    expected, _ = REFERENCE(**{**case, **{name: x.float() for name, x in tensors.items()}})
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
