"""min_p, top_k and top_p: which tokens of a row may be drawn at all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rapid_infer.ops.registry import op


@op()
def truncate_logits(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Minus infinity for tokens that min_p, then top_k, then top_p take away, each from what the one before has left.

    logits fp32 `[n, vocab]`, after the temperature; top_k integer (0: off), top_p and min_p fp32, all `[n]`, None where
    no row asks for it; top_k and top_p come together. Kept are tokens at least min_p times as likely as the best; of
    these the k best; of these the smallest set that reaches top_p. The best token always stays; among equal logits the
    lower id comes first. A row whose best logit is not finite keeps it. A provider may reuse the buffer. Where top_p
    ends in a long tail depends on the rounding of sums: a provider may be closer to the exact place than this is.
    """
    if min_p is not None:
        floor = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)
        logits = logits.masked_fill(logits < floor, -math.inf)
    if top_k is None or top_p is None:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    beyond_k = (rank >= top_k.unsqueeze(1)) & (top_k > 0).unsqueeze(1)
    ordered = ordered.masked_fill(beyond_k, -math.inf)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    beyond_p = (before >= top_p.unsqueeze(1)) & (rank > 0) & (top_p < 1).unsqueeze(1)
    return torch.empty_like(logits).scatter_(1, index, ordered.masked_fill(beyond_p, -math.inf))
