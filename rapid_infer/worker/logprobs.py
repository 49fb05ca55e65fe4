"""Log-probabilities of the tokens chosen, and of the best ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Logprobs(NamedTuple):
    """The chosen token first, then the best `count`, in order: ids int64 and values fp32 `[n, 1 + count]`.

    rank `[n]` int64: that of the chosen token, 1 for the best.
    """

    ids: Tensor
    values: Tensor
    rank: Tensor


def gather_logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    """Of logits fp32 `[n, vocab]`, as the model gave them before any sampling setting; chosen int64 `[n]`."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    mine = logits.gather(1, chosen.unsqueeze(1))
    rank = (logits > mine).sum(dim=-1) + 1
    best, ids = logits.topk(min(count, logits.shape[1]), dim=-1)
    return Logprobs(
        ids=torch.cat((chosen.unsqueeze(1), ids), dim=1),
        values=torch.cat((mine, best), dim=1) - total,
        rank=rank,
    )


def concatenate(pieces: list[Logprobs]) -> Logprobs:
    return Logprobs(*(torch.cat(fields) for fields in zip(*pieces)))
