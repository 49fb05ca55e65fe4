"""From the hidden states of the sampled rows to their next tokens, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rapid_infer.engine.step_plan import SamplingFeatures
from rapid_infer.layers.embedding import LMHead
from rapid_infer.worker.logprobs import Logprobs, gather_logprobs
from rapid_infer.worker.request_table import RequestTable
from rapid_infer.worker.sampler import SamplingOps, sample


@dataclass(slots=True)
class Chosen:
    """tokens `[n]` int64; best `[n]` fp32, not finite for a row that failed, whose token means nothing."""

    tokens: Tensor
    best: Tensor
    logprobs: Logprobs | None = None


def choose(
    head: LMHead,
    table: RequestTable,
    hidden: Tensor,
    rows: Tensor,
    lengths: Tensor,
    features: SamplingFeatures,
    ops: SamplingOps,
) -> Chosen:
    """One token for each of `rows` `[n]` int64, by the settings in `table`, which is left as it is.

    hidden `[n, hidden]`; lengths `[n]`: tokens of each row before the new one.
    """
    if not (features.random or features.processed or features.logprobs is not None):
        best, tokens = head.argmax(hidden)
        return Chosen(tokens, best)
    raw = logits = head.logits(hidden)
    state = table.sampling.take(rows)
    failed = None
    if features.processed:
        failed = ~torch.isfinite(raw.amax(dim=-1))
        logits = table.tokens.process(raw, rows, lengths, state, features)
    tokens, bad = sample(logits, state, lengths, features, ops)
    if failed is not None:
        bad = bad | failed
        tokens = tokens.where(~bad, 0)
    best = torch.zeros_like(bad, dtype=torch.float32).masked_fill(bad, math.nan)
    logprobs = None if features.logprobs is None else gather_logprobs(raw, tokens, features.logprobs)
    return Chosen(tokens, best, logprobs)
