"""From logits to tokens, on the device, in fp32, without waiting for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rapid_infer.engine.step_plan import SamplingFeatures
from rapid_infer.worker import noise


@dataclass
class SamplingState:
    """Per-row settings, all `[rows]`: temperature fp32 (0: greedy), top_k int32 (0: off), top_p fp32, and the noise
    key.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    sample_index: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> SamplingState:
        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        return cls(
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int32),
            top_p=zeros(torch.float32).fill_(1.0),
            seed=zeros(torch.int64),
            sample_index=zeros(torch.int32),
        )

    def take(self, rows: Tensor) -> SamplingState:
        fields = (self.temperature, self.top_k, self.top_p, self.seed, self.sample_index)
        return SamplingState(*(field[rows] for field in fields))


def sample(logits: Tensor, state: SamplingState, position: Tensor, features: SamplingFeatures) -> tuple[Tensor, Tensor]:
    """One token per row.

    logits fp32 `[rows, vocab]`, `state` and `position` (index of the new token) of the same rows; returns (token int64
    `[rows]`,
    failed bool `[rows]`). A failed row had NaN, or no finite maximum; its token is 0, so that it can be looked up
    safely.
    Greedy rows get the plain argmax, whatever their neighbours ask for.
    """
    best, token = logits.max(dim=-1)
    failed = ~torch.isfinite(best)
    if features.random:
        greedy = state.temperature == 0
        scaled = logits / state.temperature.where(~greedy, 1.0).unsqueeze(1)
        if features.truncated:
            scaled = truncate(scaled, state.top_k, state.top_p)
        noisy = scaled + noise.gumbel(state.seed, state.sample_index, position, logits.shape[1])
        token = token.where(greedy, noisy.argmax(dim=-1))
    return token.where(~failed, 0), failed


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Minus infinity outside the top k, then outside the smallest set that reaches top_p of what is left.

    logits fp32 `[rows, vocab]`, top_k int32 `[rows]` (0: off), top_p fp32 `[rows]`. The best token always stays; among
    equal
    logits the lower id comes first.
    """
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    beyond_k = (rank >= top_k.unsqueeze(1)) & (top_k > 0).unsqueeze(1)
    ordered = ordered.masked_fill(beyond_k, -math.inf)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    beyond_p = (before >= top_p.unsqueeze(1)) & (rank > 0) & (top_p < 1).unsqueeze(1)
    return torch.empty_like(logits).scatter_(1, index, ordered.masked_fill(beyond_p, -math.inf))
