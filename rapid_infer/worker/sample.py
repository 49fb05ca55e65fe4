"""From the hidden states of the sampled rows to their next tokens: on the device, in fp32, without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rapid_infer import ops
from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.layers.embedding import LMHead
from rapid_infer.worker.device_rows import DeviceRows
from rapid_infer.worker.logprobs import Logprobs, gather_logprobs
from rapid_infer.worker.row_settings import RowSettings


class SamplingOps(NamedTuple):
    """The operators of `sample_logits`, references or bound providers."""

    truncate_logits: Callable[..., Tensor] = ops.truncate_logits
    gumbel_argmax: Callable[..., tuple[Tensor, Tensor, Tensor]] = ops.gumbel_argmax

    @classmethod
    def bind(cls, resolver: ops.OpResolver) -> SamplingOps:
        return cls(*(resolver.bind(name, torch.float32) for name in cls._fields))


REFERENCE = SamplingOps()


@dataclass(slots=True)
class SampledTokens:
    """tokens `[n]` int64; finite_if_valid `[n]` fp32.

    That a row failed is carried in that value, which nobody reads otherwise: it is NaN or infinite, and the row's token
    means nothing. Valid rows have their highest logit there, or 0.
    """

    tokens: Tensor
    finite_if_valid: Tensor
    logprobs: Logprobs | None = None


def sample_tokens(
    head: LMHead,
    device_rows: DeviceRows,
    hidden: Tensor,
    rows: Tensor,
    lengths: Tensor,
    features: SamplingFeatures,
    with_ops: SamplingOps,
) -> SampledTokens:
    """One token for each of `rows` `[n]` int64, by the settings in `device_rows`, which are left as they are.

    hidden `[n, hidden]`; lengths `[n]`: tokens of each row before the new one.
    """
    if not (features.random or features.processed or features.logprobs is not None):
        best, tokens = head.argmax(hidden)
        return SampledTokens(tokens, best)
    state = device_rows.sampling.gather_rows(rows)
    if head.parallel.tp_size > 1 and features.only_random:
        settings = state.temperature, state.seed, state.sample_index, lengths
        return _draw_from_shards(head, hidden, settings, with_ops)
    raw = logits = head.logits(hidden)
    failed = None
    if features.processed:
        failed = ~torch.isfinite(raw.amax(dim=-1))
        logits = device_rows.tokens.process_logits(raw, rows, lengths, state, features)
    tokens, bad = sample_logits(logits, state, lengths, features, with_ops)
    if failed is not None:
        bad = bad | failed
        tokens = tokens.where(~bad, 0)
    finite_if_valid = torch.zeros_like(bad, dtype=torch.float32).masked_fill(bad, math.nan)
    logprobs = None if features.logprobs is None else gather_logprobs(raw, tokens, features.logprobs)
    return SampledTokens(tokens, finite_if_valid, logprobs)


def _draw_from_shards(
    head: LMHead, hidden: Tensor, settings: tuple[Tensor, ...], with_ops: SamplingOps
) -> SampledTokens:
    """The best of every rank's draw from its own part of the vocabulary: what one rank would draw, with nothing but
    scores and ids exchanged.
    """
    mine, failed, score = with_ops.gumbel_argmax(head.shard_logits(hidden), *settings, head.start)
    value, tokens = head.parallel.best(score.masked_fill(failed, math.nan), mine)
    return SampledTokens(tokens, value)


def sample_logits(
    logits: Tensor,
    state: RowSettings,
    position: Tensor,
    features: SamplingFeatures,
    with_ops: SamplingOps = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """One token per row.

    logits fp32 `[rows, vocab]`, `state` and `position` (index of the new token) of the same rows; returns (token int64
    `[rows]`, failed bool `[rows]`). A failed row had NaN, or no finite maximum; its token is 0, so that it can be
    looked up safely. Greedy rows get the plain argmax, whatever their neighbours ask for.
    """
    if not features.random:
        best, token = logits.max(dim=-1)
        failed = ~torch.isfinite(best)
        return token.where(~failed, 0), failed
    temperature = state.temperature
    if features.truncated or features.min_p:
        logits = logits / temperature.where(temperature > 0, 1.0).unsqueeze(1)
        # What is left for the draw is to tell greedy rows from others.
        temperature = temperature.sign()
        top_k, top_p = (state.top_k, state.top_p) if features.truncated else (None, None)
        logits = with_ops.truncate_logits(logits, top_k, top_p, state.min_p if features.min_p else None)
    return with_ops.gumbel_argmax(logits, temperature, state.seed, state.sample_index, position)[:2]
