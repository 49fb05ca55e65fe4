"""Looking up the rows of a vocabulary's matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import op


@op()
def embedding(input_ids: Tensor, weight: Tensor, start: int | None = None) -> Tensor:
    """`weight[input_ids]`; where the matrix is a part of the vocabulary's, `weight[input_ids - start]`, and zeros for
    ids that it does not have.

    input_ids `[tokens]` int64, all within the matrix if `start` is None; weight `[rows, size]`; returns
    `[tokens, size]`.
    """
    if start is None:
        return F.embedding(input_ids, weight)
    local = input_ids - start
    here = (local >= 0) & (local < len(weight))
    return F.embedding(local.where(here, 0), weight).masked_fill(~here.unsqueeze(-1), 0)
