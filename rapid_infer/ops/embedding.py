"""Looking up the rows of a vocabulary's matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import op


@op()
def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """`weight[input_ids]`.

    input_ids `[tokens]` int64, all within the matrix, weight `[rows, size]`; returns `[tokens, size]`.
    """
    return F.embedding(input_ids, weight)
