"""min_p, top_k and top_p: which tokens of a row may be drawn at all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    top_k = torch.tensor([0, 1, 7, 2**31 - 1, 0, 40, 0, 12, 0, 0], dtype=torch.int32, device=device)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.5, 0.7, 1.0, 0.8, 1e-9, 0.0], device=device)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.0, 0.0], device=device)
    for vocab, scale in ((64, 1.0), (3001, 3.0)):
        # As a head of this dtype gives them: in 16 bits many are equal.
        logits = (torch.randn(len(top_k), vocab, device=device) * scale).to(dtype).float()
        logits[:, ::5] = -math.inf
        yield Case({"logits": logits, "top_k": top_k, "top_p": top_p, "min_p": min_p})
        yield Case({"logits": logits, "top_k": top_k, "top_p": top_p, "min_p": None})
        yield Case({"logits": logits, "top_k": None, "top_p": None, "min_p": min_p})


@op(inputs=_inputs)
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
