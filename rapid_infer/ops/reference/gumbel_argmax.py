"""The draw of one token per row, by the argmax of noisy logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops import noise
from rapid_infer.ops.registry import op


@op()
def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seed: Tensor, sample_index: Tensor, position: Tensor, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """A draw from `softmax(logits / temperature)`: the argmax of it plus `noise.gumbel`; at temperature 0 the argmax.

    logits fp32 `[n, vocab]` of the ids from `start` on; temperature fp32, seed int64, sample_index and position
    integer, all `[n]`. Returns (token int64 `[n]`, failed bool `[n]`, score fp32 `[n]`): the score is what the token
    won with, so that the best of several parts of a vocabulary is the draw from all of it. Among equals the lower id. A
    failed row had NaN, or no finite maximum; its token is `start`, its score 0.
    """
    best, token = logits.max(dim=-1)
    failed = ~torch.isfinite(best)
    greedy = temperature == 0
    scaled = logits / temperature.where(~greedy, 1.0).unsqueeze(1)
    noisy = scaled + noise.gumbel(seed, sample_index, position, logits.shape[1], start)
    score, drawn = noisy.max(dim=-1)
    token, score = token.where(greedy, drawn), best.where(greedy, score)
    return token.where(~failed, 0) + start, failed, score.where(~failed, 0.0)
