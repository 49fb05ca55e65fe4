"""Looking up the rows of a vocabulary's matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for tokens, vocab, size in ((1, 5, 64), (9, 33, 40), (40, 7, 1536)):
        weight = torch.randn(vocab, size, device=device).to(dtype)
        yield Case({"input_ids": torch.randint(vocab, (tokens,), device=device), "weight": weight})


@op(inputs=_inputs)
def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """`weight[input_ids]`.

    input_ids `[tokens]` int64, all within the matrix, weight `[rows, size]`; returns `[tokens, size]`.
    """
    return F.embedding(input_ids, weight)
