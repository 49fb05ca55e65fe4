"""Triton's latent attention beyond the generic test: padding rows, slots nobody wrote, strides, plans used again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rapid_infer.ops import OPS
from rapid_infer.ops.paged_attention import make_metadata
from rapid_infer.ops.providers.triton import attention_plan, latent_prefill
from rapid_infer.ops.providers.triton.latent_attention import latent_attention
from rapid_infer.ops.providers.triton.latent_kv_write import latent_kv_write
from rapid_infer.ops.providers.triton.latent_tile import latent_shape
from rapid_infer.ops.rope_kv_write import slots_only

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = OPS["latent_attention"].reference


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_case(seq_lens: list[int], query_lens: list[int], heads: int = 6, rank: int = 32, size: int = 16) -> Any:
    """Arguments for the op, with NaN wherever the cache holds no key of a row; the cache is a layer of several."""
    metadata, blocks = make_metadata(seq_lens, query_lens, size, DEVICE)
    cache = torch.full((3, blocks, size, rank + 8), math.nan, device=DEVICE)[1]
    for row, n in enumerate(seq_lens):
        key = torch.arange(n, device=DEVICE)
        cache[metadata.block_table[row, key // size].long(), key % size] = torch.randn(n, rank + 8, device=DEVICE)
    q = torch.randn(sum(query_lens), heads, rank + 8, device=DEVICE)
    return {"q": q, "cache": cache, "metadata": metadata, "scale": 0.2, "rank": rank}


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([300, 1, 16, 17], [1, 1, 1, 1]),
        ([90, 90], [1, 1]),
        ([40, 3, 50, 33], [1, 3, 18, 33]),
        ([64, 31, 96], [32, 31, 64]),
    ],
)
@pytest.mark.parametrize("size", [8, 16, 64])
def test_lengths_chunks_and_block_sizes(seq_lens: list[int], query_lens: list[int], size: int) -> None:
    case = make_case(seq_lens, query_lens, size=size)
    torch.testing.assert_close(latent_attention(**case), REFERENCE(**case), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("programs", [1, 3, 20])
def test_rows_spread_over_slices(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "PROGRAMS_PER_MULTIPROCESSOR", programs)
    case = make_case([200, 5, 90], [1, 1, 1], heads=20)
    torch.testing.assert_close(latent_attention(**case), REFERENCE(**case), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("queries", [1, 4, 64])
def test_tiles_of_tokens(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than the heads of one token, some tokens, and more than a row has."""
    monkeypatch.setattr(latent_prefill, "FP32_QUERIES", queries)
    case = make_case([40, 7], [9, 7], heads=4)
    torch.testing.assert_close(latent_attention(**case), REFERENCE(**case), atol=2e-5, rtol=2e-5)


def test_padding_rows_get_zeros() -> None:
    case = make_case([9, 1, 20], [1, 1, 1])
    case["metadata"].seq_lens[1] = 0
    got = latent_attention(**case)
    assert not got[1].any()
    case["metadata"].seq_lens[1] = 1
    torch.testing.assert_close(got[[0, 2]], REFERENCE(**case)[[0, 2]], atol=2e-5, rtol=2e-5)


def test_layers_of_a_step_share_the_plan_and_give_the_same_bits() -> None:
    case = make_case([120, 33], [1, 1])
    first = latent_attention(**case)
    assert len(case["metadata"].plans) == 1
    assert torch.equal(latent_attention(**case), first)
    assert len(case["metadata"].plans) == 1


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
