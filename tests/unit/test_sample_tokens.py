"""One token per row: which rows have failed, whatever bias and masks have made of their logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rapid_infer.engine.masks import pack
from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.engine.step_plan import RowMasks
from rapid_infer.parallel import ParallelState
from rapid_infer.worker.device_rows import DeviceRows
from rapid_infer.worker.sample import SamplingOps, sample_tokens
from rapid_infer.worker.token_state import TokenState

VOCAB = 40
ALLOWED = range(8)


class Head:
    """Scores as they are given."""

    parallel = ParallelState()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        best, token = hidden.max(dim=-1)
        return best, token


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("place", [3, 30], ids=["allowed", "forbidden"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_whose_logits_are_not_finite_fails_behind_its_mask(bad: float, place: int, temperature: float) -> None:
    torch.manual_seed(0)
    device_rows = DeviceRows(torch.device("cpu"), 3, 1, 2, VOCAB)
    masks = RowMasks(np.arange(3, dtype=np.int32), np.stack([pack(ALLOWED, VOCAB)] * 3))
    device_rows.tokens.apply_changes(
        None, masks, iter([torch.from_numpy(array) for array in TokenState.pack_changes(None, masks)])
    )
    device_rows.sampling.temperature.fill_(temperature)
    logits = torch.randn(3, VOCAB)
    logits[1, place] = bad
    features = SamplingFeatures(random=temperature > 0, masks=True)
    head: Any = Head()
    sampled = sample_tokens(head, device_rows, logits, torch.arange(3), torch.full((3,), 4), features, SamplingOps())
    assert sampled.finite_if_valid.isfinite().tolist() == [True, False, True]
    assert sampled.tokens[1] == 0
    assert all(token in ALLOWED for token in sampled.tokens.tolist())
