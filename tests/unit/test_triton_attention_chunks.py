"""Triton's attention of prompts in pieces: borders at every offset around a page, and many tiny sequences."""

import pytest
import torch

pytest.importorskip("triton")

from attention_chunks import DTYPES, borders, check_mla, check_paged, paged_case

from rapid_infer.ops.providers.triton.attention import prefill_config as attention_prefill_config
from rapid_infer.ops.providers.triton.attention import tile as attention_tile
from rapid_infer.ops.providers.triton.mla import prefill as mla_prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 4
EVERY = borders(range(PAGE + 2), range(1, PAGE + 2))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["wide tiles", "small tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small ones a chunk begins and ends in other places of a tile as well."""
    if request.param == "small tiles":
        monkeypatch.setattr(attention_tile, "MAX_TILE", 16)
        for name in ("QUERIES", "FEW_QUERIES", "FP32_QUERIES", "POINTER_KEYS"):
            monkeypatch.setattr(attention_prefill_config, name, 16)
        for name in ("QUERIES", "FEW_QUERIES", "TILE"):
            monkeypatch.setattr(mla_prefill, name, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_of_every_length_after_contexts_of_every_length(dtype: torch.dtype, tiles: None) -> None:
    check_paged(paged_case(EVERY, 2, 1, 16, PAGE, dtype, DEVICE))


@pytest.mark.parametrize("dim", [64, 128])
def test_head_dims_of_models(dim: int) -> None:
    check_paged(paged_case(borders((0, 15, 16, 17), (1, 15, 16, 17)), 2, 1, dim, 16, torch.float32, DEVICE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_chunks_of_every_length_after_contexts_of_every_length(dtype: torch.dtype, tiles: None) -> None:
    check_mla(EVERY, 2, 16, 16, 8, 16, PAGE, dtype, DEVICE)


def test_latent_head_dims_of_models() -> None:
    """Keys of 192 features and values of 128."""
    check_mla(borders((0, 17), (2, 16)), 2, 32, 128, 64, 128, 16, torch.float32, DEVICE)


@pytest.mark.parametrize("decodes", [0, 2])
def test_chunks_of_one_token_among_longer_ones(decodes: int) -> None:
    """More than the metadata promises: rows that have one token and do not count as decodes."""
    case = paged_case(EVERY, 2, 1, 16, PAGE, torch.float32, DEVICE)
    assert case["metadata"].num_decodes == PAGE + 2
    case["metadata"].num_decodes = decodes
    check_paged(case)


@pytest.mark.parametrize("decodes", [200, pytest.param(0, marks=pytest.mark.slow)])
def test_many_sequences_of_one_token(decodes: int) -> None:
    case = paged_case(([1] * 200, [1] * 200), 2, 1, 16, PAGE, torch.float32, DEVICE)
    case["metadata"].num_decodes = decodes
    check_paged(case)
