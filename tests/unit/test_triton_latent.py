"""Triton's latent attention beyond the generic test: padding rows, slots nobody wrote, strides, plans used again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rapid_infer.ops import OPS
from rapid_infer.ops.paged_attention import make_metadata
from rapid_infer.ops.providers.triton import attention_plan
from rapid_infer.ops.providers.triton import latent_context as context_module
from rapid_infer.ops.providers.triton import latent_prefill as prefill_module
from rapid_infer.ops.providers.triton.latent_context import latent_context
from rapid_infer.ops.providers.triton.latent_decode import latent_decode
from rapid_infer.ops.providers.triton.latent_kv_write import latent_kv_write
from rapid_infer.ops.providers.triton.latent_prefill import latent_prefill
from rapid_infer.ops.providers.triton.latent_tile import latent_shape
from rapid_infer.ops.rope_kv_write import slots_only

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_case(seq_lens: list[int], query_lens: list[int], heads: int = 6, rank: int = 32, size: int = 16) -> Any:
    """Arguments for decode or, with query lengths above one, context; NaN wherever the cache holds no key of a row.

    The cache is a layer of several.
    """
    metadata, blocks = make_metadata(seq_lens, query_lens, size, DEVICE)
    cache = torch.full((3, blocks, size, rank + 8), math.nan, device=DEVICE)[1]
    for row, n in enumerate(seq_lens):
        key = torch.arange(n, device=DEVICE)
        cache[metadata.block_table[row, key // size].long(), key % size] = torch.randn(n, rank + 8, device=DEVICE)
    alone, tokens = query_lens.count(1), sum(query_lens)
    q = torch.randn(tokens - alone if tokens > alone else alone, heads, rank + 8, device=DEVICE)
    return {"q": q, "cache": cache, "metadata": metadata, "scale": 0.2, "rank": rank}


def check_decode(case: Any) -> None:
    torch.testing.assert_close(latent_decode(**case), OPS["latent_decode"].reference(**case), **CLOSE)


def check_context(case: Any) -> None:
    torch.testing.assert_close(latent_context(**case), OPS["latent_context"].reference(**case), **CLOSE)


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


@pytest.mark.parametrize("programs", [1, 3, 20])
def test_rows_spread_over_slices(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", programs)
    check_decode(make_case([200, 5, 90], [1, 1, 1], heads=20))


@pytest.mark.parametrize("queries", [1, 4, 64])
def test_tiles_of_tokens_before_a_context(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than the heads of one token, some tokens, and more than a row has."""
    monkeypatch.setattr(context_module, "FP32_QUERIES", queries)
    check_context(make_case([40, 7], [9, 7], heads=4))


def test_padding_rows_get_zeros() -> None:
    case = make_case([9, 1, 20], [1, 1, 1])
    case["metadata"].seq_lens[1] = 0
    got = latent_decode(**case)
    assert not got[1].any()
    case["metadata"].seq_lens[1] = 1
    torch.testing.assert_close(got[[0, 2]], OPS["latent_decode"].reference(**case)[[0, 2]], **CLOSE)


def test_layers_of_a_step_share_the_plan_and_give_the_same_bits() -> None:
    case = make_case([120, 33], [1, 1])
    first = latent_decode(**case)
    assert len(case["metadata"].plans) == 1
    assert torch.equal(latent_decode(**case), first)
    assert len(case["metadata"].plans) == 1


@pytest.mark.parametrize(("queries", "tile"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("with_context", [False, True])
def test_tiles_of_a_steps_own_tokens(
    queries: int, tile: int, with_context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores far apart, so that parts of very different weight are put together; queries are slices of wider rows."""
    monkeypatch.setattr(prefill_module, "FP32_QUERIES", queries)
    monkeypatch.setattr(prefill_module, "FP32_TILE", tile)
    query_lens = [1, 40, 2, 17]
    metadata, _ = make_metadata([n + 1 for n in query_lens], query_lens, 4, DEVICE)
    tokens, heads = 59, 3
    wide, entries = torch.randn(tokens, heads, 40, device=DEVICE), torch.randn(tokens, 24, device=DEVICE)
    lse = 8 * torch.randn(tokens, heads, device=DEVICE)
    lse[:41] = -math.inf
    context = torch.randn(tokens, heads, 16, device=DEVICE)
    arguments: dict[str, Any] = {
        "q_nope": wide[..., 3:19],
        "q_rope": wide[..., 32:],
        "kv": torch.randn(tokens, heads, 32, device=DEVICE),
        "key": entries[:, 16:],
        "metadata": metadata,
        "scale": 1.5,
        "context": context if with_context else None,
        "context_lse": lse if with_context else None,
    }
    torch.testing.assert_close(
        latent_prefill(**arguments), OPS["latent_prefill"].reference(**arguments), atol=1e-4, rtol=1e-4
    )


def test_heads_are_cut_into_equal_blocks() -> None:
    cache = torch.empty(1, 64, 576)
    shapes = {heads: latent_shape(torch.empty(1, heads, 576), cache, 1.0, 512, 64) for heads in (1, 16, 64, 70, 128)}
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
    for fn, cache, query in zip((latent_kv_write, OPS["latent_kv_write"].reference), caches, queries):
        by_head = q.unflatten(1, (heads, nope + rope))
        fn(by_head, kv, positions, table, slots_only(slots), cache[1], weight, 1e-6, True, query)
    torch.testing.assert_close(caches[0], caches[1], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(queries[0], queries[1], atol=2e-5, rtol=2e-5)
    assert not caches[0][[0, 2]].any()
    assert not queries[0][..., :rank].any()
