"""The draw of one token per row, by the argmax of noisy logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops import noise
from rapid_infer.ops.registry import op


@op()
def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seed: Tensor, sample_index: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """A draw from `softmax(logits / temperature)`: the argmax of it plus `noise.gumbel`; at temperature 0 the argmax.

    logits fp32 `[n, vocab]`; temperature fp32, seed int64, sample_index and position integer, all `[n]`. Returns
    (token int64 `[n]`, failed bool `[n]`). Among equals the lower id. A failed row had NaN, or no finite maximum; its
    token is 0, so that it can be looked up safely.
    """
    best, token = logits.max(dim=-1)
    failed = ~torch.isfinite(best)
    greedy = temperature == 0
    scaled = logits / temperature.where(~greedy, 1.0).unsqueeze(1)
    noisy = scaled + noise.gumbel(seed, sample_index, position, logits.shape[1])
    token = token.where(greedy, noisy.argmax(dim=-1))
    return token.where(~failed, 0), failed
