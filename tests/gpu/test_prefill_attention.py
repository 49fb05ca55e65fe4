"""Every way to cut prompts into programs gives the reference's attention, whatever lies in unused slots."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attention_chunks import borders, check_paged, paged_case, with_options

from rapid_infer.ops import OPS
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.ops.providers.triton.attention import prefill as attention_prefill
from rapid_infer.ops.providers.triton.attention.paged_attention import paged_attention
from rapid_infer.ops.providers.triton.attention.prefill_config import PrefillConfig
from rapid_infer.testing.op_cases.attention import make_metadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs SM 90"
    ),
]
CONFIGS = {
    "pointers": PrefillConfig(128, 64, warps=8, stages=3),
    "tma": PrefillConfig(128, 64, warps=8, stages=3, tma=True),
    "few": PrefillConfig(64, 64, warps=4, stages=3, tma=True),
    "hopper": PrefillConfig(128, 64, warps=4, stages=2, tma=True, hopper=True),
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 100},
    {"window": 7},
    {"soft_cap": 20.0},
    {"sinks": True},
    {"window": 300, "soft_cap": 20.0, "sinks": True},
)
SHAPES = ((8, 2, 128), (2, 2, 64), (6, 1, 128), (16, 8, 128))
"""heads, kv heads, dim"""
CASES = [*product(VARIANTS[:1], SHAPES, (64, 128)), *product(VARIANTS[1:], SHAPES[:2], (64,))]
# Rows of one token first; queries at and around the ends of tiles and pages, alone and after cached keys.
SEQ_LENS = [7, 300, 5, 63, 64, 65, 127, 128, 129, 700, 1000, 321, 2000]
QUERY_LENS = [1, 1, 5, 63, 64, 65, 127, 128, 129, 700, 33, 320, 2]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("variant", "shape", "size"), CASES, ids=str)
def test_prefill(
    name: str, variant: dict[str, Any], shape: tuple[int, ...], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, dim = shape
    torch.manual_seed(0)
    monkeypatch.setattr(attention_prefill, "choose", lambda *_: CONFIGS[name])
    metadata, blocks = make_metadata(SEQ_LENS, QUERY_LENS, size, "cuda")
    used = torch.zeros(blocks * size, dtype=torch.bool, device="cuda")
    for row, n in enumerate(SEQ_LENS):
        key = torch.arange(n, device="cuda")
        used[metadata.block_table[row, key // size].long() * size + key % size] = True
    # Keys and values in one tensor, so that blocks do not follow each other.
    cache = torch.randn(blocks, 2, size, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    cache.transpose(1, 2)[~used.view(blocks, size)] = math.nan
    case = {
        "q": torch.randn(sum(QUERY_LENS), heads, dim, dtype=torch.bfloat16, device="cuda"),
        "k_cache": cache[:, 0],
        "v_cache": cache[:, 1],
        "metadata": metadata,
        "params": AttentionParams(dim**-0.5, return_lse=True),
    }
    case = with_options(case, **variant)
    out, lse = paged_attention(**case)
    expected, expected_lse = OPS["paged_attention"].reference(**case)
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "hopper"])
@pytest.mark.parametrize("options", [{}, {"window": 3000}, {"sinks": True}], ids=str)
def test_few_queries_over_many_keys(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of tiles are added by whoever is last, the same bits each time, in every layer of a step."""
    torch.manual_seed(0)
    monkeypatch.setattr(attention_prefill, "choose", lambda *_: CONFIGS[name])
    case = paged_case(([51, 20040, 703, 2], [1, 40, 3, 2]), 8, 2, 128, 64, torch.bfloat16, "cuda")
    case = with_options(case, **options)
    check_paged(case)
    first = paged_attention(**case)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(paged_attention(**case), first) if a is not None)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dim", [64, 128])
def test_chunks_of_every_length_around_a_page(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(attention_prefill, "choose", lambda *_: CONFIGS[name])
    lengths = borders((0, 1, 2, 31, 32, 33, 62, 63, 64, 65), range(1, 66))
    check_paged(paged_case(lengths, 8, 2, dim, 64, torch.bfloat16, "cuda"))


def test_a_plan_counts_from_zero_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take items as they come to them: more than there are programs, single pages and pairs, odd and even."""
    torch.manual_seed(0)
    monkeypatch.setattr(attention_prefill, "choose", lambda *_: CONFIGS["hopper"])
    case = paged_case(
        ([2500, 1300, 640, 577, 64, 9], [2500, 1100, 640, 577, 63, 2]), 16, 8, 128, 64, torch.bfloat16, "cuda"
    )
    check_paged(case)
    first = paged_attention(**case)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(paged_attention(**case), first) if a is not None)
