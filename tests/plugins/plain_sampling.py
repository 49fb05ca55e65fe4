"""What SamplingParams mean, in plain arithmetic on the oracle's logits: no tables, no bits, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rapid_infer import SamplingParams
from rapid_infer.ops.noise import gumbel
from rapid_infer.testing import Oracle

Allowed = Callable[[list[int]], Sequence[int]]
"""From the output so far to the ids that may follow."""


@dataclass
class Job:
    """A request, and what becomes of it. `raw`: the model's logits behind each token. `gap`: the closest call."""

    prompt: list[int]
    params: SamplingParams
    stop: tuple[int, ...] = ()
    index: int = 0
    allowed: Allowed | None = None
    tokens: list[int] = field(default_factory=list)
    raw: list[torch.Tensor] = field(default_factory=list)
    reason: str | None = None
    gap: float = math.inf

    @property
    def scores(self) -> list[torch.Tensor]:
        return [logits.log_softmax(-1) for logits in self.raw]


def solve(oracle: Oracle, jobs: Sequence[Job]) -> None:
    """Fill in the jobs. Those of equal length run as one batch."""
    while open_ := [job for job in jobs if job.reason is None]:
        length = min(len(job.prompt) + len(job.tokens) for job in open_)
        batch = [job for job in open_ if len(job.prompt) + len(job.tokens) == length]
        logits = oracle.logits([job.prompt + job.tokens for job in batch])[:, -1].double()
        for job, raw in zip(batch, logits):
            _advance(job, raw)


def _advance(job: Job, raw: torch.Tensor) -> None:
    params = job.params
    final = _draw_scores(_processed(raw.clone(), job), job)
    best = final.topk(2)
    job.gap = min(job.gap, float(best.values[0] - best.values[1]))
    token = int(best.indices[0])
    job.tokens.append(token)
    job.raw.append(raw)
    if token in job.stop:
        job.reason = "stop"
    elif len(job.tokens) == params.max_tokens:
        job.reason = "length"


def _processed(scores: torch.Tensor, job: Job) -> torch.Tensor:
    params = job.params
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    allowed = params.allowed_token_ids if job.allowed is None else job.allowed(job.tokens)
    possible = set(range(len(scores))) if allowed is None else set(allowed)
    if len(job.tokens) < params.min_tokens and possible - set(job.stop):
        possible -= set(job.stop)
    for token in range(len(scores)):
        if token not in possible:
            scores[token] = -math.inf
    for token in {*job.prompt, *job.tokens}:
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
    for token in set(job.tokens):
        scores[token] -= params.presence_penalty + params.frequency_penalty * job.tokens.count(token)
    return scores


def _draw_scores(scores: torch.Tensor, job: Job) -> torch.Tensor:
    """Scores whose argmax is the drawn token."""
    params = job.params
    if params.temperature < 1e-5:
        return scores
    scores = scores / params.temperature
    probability = scores.softmax(-1)
    scores[probability < params.min_p * probability.max()] = -math.inf
    order = scores.argsort(descending=True, stable=True).tolist()
    if params.top_k > 0:
        scores[order[params.top_k :]] = -math.inf
    probability, mass = scores.softmax(-1), 0.0
    for token in order:
        if mass >= params.top_p < 1:
            scores[token] = -math.inf
        mass += float(probability[token])
    key = torch.tensor([params.seed]), torch.tensor([job.index]), torch.tensor([len(job.prompt) + len(job.tokens)])
    return scores + gumbel(*key, len(scores))[0].double()
