"""From logits to tokens, on the device, in fp32, without waiting for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rapid_infer.engine.step_plan import SamplingFeatures
from rapid_infer.worker import noise


@dataclass
class SamplingState:
    """Per-row settings, all `[rows]`; fp32 but for top_k, min_length and sample_index (int32) and seed (int64).

    temperature 0 is greedy, top_k 0 off. Below a total length of `min_length` no stop token may be chosen.
    """

    min_length: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    sample_index: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> SamplingState:
        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            min_length=full(0, torch.int32),
            temperature=full(0.0),
            top_k=full(0, torch.int32),
            top_p=full(1.0),
            min_p=full(0.0),
            repetition_penalty=full(1.0),
            presence_penalty=full(0.0),
            frequency_penalty=full(0.0),
            seed=full(0, torch.int64),
            sample_index=full(0, torch.int32),
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    def take(self, rows: Tensor) -> SamplingState:
        """The same settings for some rows."""
        return SamplingState(*(getattr(self, name)[rows] for name in self.names()))


def sample(logits: Tensor, state: SamplingState, position: Tensor, features: SamplingFeatures) -> tuple[Tensor, Tensor]:
    """One token per row.

    logits fp32 `[rows, vocab]`, `state` and `position` (index of the new token) of the same rows; returns (token int64
    `[rows]`, failed bool `[rows]`). A failed row had NaN, or no finite maximum; its token is 0, so that it can be
    looked
    up safely. Greedy rows get the plain argmax, whatever their neighbours ask for.
    """
    best, token = logits.max(dim=-1)
    failed = ~torch.isfinite(best)
    if features.random:
        greedy = state.temperature == 0
        scaled = logits / state.temperature.where(~greedy, 1.0).unsqueeze(1)
        if features.min_p:
            scaled = keep_likely(scaled, state.min_p)
        if features.truncated:
            scaled = truncate(scaled, state.top_k, state.top_p)
        noisy = scaled + noise.gumbel(state.seed, state.sample_index, position, logits.shape[1])
        token = token.where(greedy, noisy.argmax(dim=-1))
    return token.where(~failed, 0), failed


def keep_likely(logits: Tensor, min_p: Tensor) -> Tensor:
    """Minus infinity for tokens less likely than min_p `[rows]` times the most likely one; that one always stays."""
    floor = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)
    return logits.masked_fill(logits < floor, -math.inf)


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Minus infinity outside the top k, then outside the smallest set that reaches top_p of what is left.

    logits fp32 `[rows, vocab]`, top_k int32 `[rows]` (0: off), top_p fp32 `[rows]`. The best token always stays; among
    equal logits the lower id comes first.
    """
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    beyond_k = (rank >= top_k.unsqueeze(1)) & (top_k > 0).unsqueeze(1)
    ordered = ordered.masked_fill(beyond_k, -math.inf)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    beyond_p = (before >= top_p.unsqueeze(1)) & (rank > 0) & (top_p < 1).unsqueeze(1)
    return torch.empty_like(logits).scatter_(1, index, ordered.masked_fill(beyond_p, -math.inf))
