"""Attention of prompts in pieces in the sizes of models: borders at every offset around a page, many tiny sequences."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attention_chunks import DTYPES, borders, check_mla, check_paged, paged_case

from rapid_infer.ops import OPS, OpInfo, load_providers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE = 64
AROUND = (0, 1, 2, 31, 32, 33, PAGE - 2, PAGE - 1, PAGE, PAGE + 1)
MLA = {"rank": 512, "nope": 128, "rope": 64, "v": 128}
"""Keys of 192 features, values of 128, in a cache of 576."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    load_providers()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_chunks_of_every_length(dim: int, dtype: torch.dtype) -> None:
    check_paged(paged_case(borders(AROUND, range(1, PAGE + 2)), 8, 2, dim, PAGE, dtype, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts_of_every_length(dtype: torch.dtype) -> None:
    check_paged(paged_case(borders(range(PAGE + 2), (1, 2, 33, PAGE, PAGE + 1)), 8, 2, 128, PAGE, dtype, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_chunks_and_contexts(dtype: torch.dtype) -> None:
    for name in ("mla_context", "mla_prefill"):
        info = {"rank": 512, "rope_dim": 64, "block_size": PAGE, "nope_dim": 128, "v_dim": 128}
        if reasons := OPS[name].providers["triton"].supports(OpInfo.of("cuda", dtype, **info)):
            pytest.skip("; ".join(reasons))
    check_mla(borders(AROUND, (1, 2, 33, PAGE - 1, PAGE, PAGE + 1)), 16, **MLA, size=PAGE, dtype=dtype, device="cuda")
    check_mla(borders((0, 1, PAGE), range(2, PAGE + 2)), 16, **MLA, size=PAGE, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decodes", [200, 0])
def test_many_sequences_of_one_token(decodes: int, dtype: torch.dtype) -> None:
    case = paged_case(([1] * 200, [1] * 200), 32, 8, 128, PAGE, dtype, "cuda")
    case["metadata"].num_decodes = decodes
    check_paged(case)
