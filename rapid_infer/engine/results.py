"""Takes a step's results back to the requests they were launched for, and says which of them end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rapid_infer.engine.request import Request, RequestStatus
from rapid_infer.engine.row_state import RowState
from rapid_infer.engine.scheduled_step import ScheduledStep
from rapid_infer.engine.scheduler import Scheduler
from rapid_infer.engine.step_plan import I32, LogprobArrays, StepResult
from rapid_infer.outputs import FinishReason

NON_FINITE = "the model gave non-finite logits (NaN or infinity) for this request"


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a request."""

    request_id: str
    reason: FinishReason
    error: str | None
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the best ones; its `rank` counts from 1."""

    token_ids: list[int]
    values: list[float]
    rank: int


@dataclass(slots=True)
class StepOutputs:
    """New tokens as parallel lists, those of one request in order, and the requests that ended. The lists may be those
    of a step: nobody changes them.

    `logprobs` and `prompt_logprobs` hold only requests that asked for them; those of the prompt come in order, in
    pieces. `num_cached_tokens` holds the requests that have just started.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)

    def add_tokens(self, request_ids: list[str], token_ids: list[int]) -> None:
        self.request_ids = self.request_ids + request_ids if self.request_ids else request_ids
        self.token_ids = self.token_ids + token_ids if self.token_ids else token_ids

    def end(self, request: Request) -> None:
        assert request.finish_reason is not None
        cached = request.num_cached_tokens or 0
        self.finished.append(Finished(request.request_id, request.finish_reason, request.error, cached))


def apply_result(scheduler: Scheduler, step: ScheduledStep, result: StepResult, outputs: StepOutputs) -> None:
    """Append the new tokens of `step` and finish what they end. Late results of ended requests are dropped."""
    _take_logprobs(step, result, outputs)
    for request in step.admitted:
        outputs.num_cached_tokens[request.request_id] = request.num_cached_tokens or 0
    rows, requests, tokens, owners = step.sampled_rows, step.sampled_requests, result.token_ids, scheduler.rows
    counts = kept = step.most if result.counts is None else result.counts.astype(np.int64)
    if result.failed.any():
        kept = np.where(result.failed, 0, kept)
    live = owners.epoch[rows] == step.epochs
    before = owners.collected[rows]
    if not live.all():
        # Preempted, or ended, while the step was in flight.
        kept = kept.copy()
        for i in np.flatnonzero(~live):
            request = requests[i]
            request.in_flight -= int(step.most[i])
            before[i] = request.num_tokens
            if request.status is RequestStatus.FINISHED:
                kept[i] = 0
    ended = result.failed
    if step.stop_ids is not None:
        stops = (step.stop_ids[:, None] == tokens[:, :, None]).any(axis=2)
        stops &= np.arange(tokens.shape[1]) < kept[:, None]
        stopped = stops.any(axis=1)
        if stopped.any():
            kept = np.where(stopped, stops.argmax(axis=1) + 1, kept)
            ended = ended | stopped
    else:
        stopped = None
    ended = ended | (before + kept >= step.limits)
    _append(owners, step, tokens, kept, live, outputs)
    if result.counts is not None:
        owners.take_back(rows[live], (step.most - counts)[live])
    for i in np.flatnonzero(ended):
        request = requests[i]
        if request.status is RequestStatus.FINISHED:
            continue
        if result.failed[i]:
            scheduler.finish(request, FinishReason.ERROR, NON_FINITE)
        else:
            by_stop = stopped is not None and stopped[i]
            scheduler.finish(request, FinishReason.STOP if by_stop else FinishReason.LENGTH)
        outputs.end(request)


def _append(
    owners: RowState, step: ScheduledStep, tokens: I32, kept: Ints, live: NDArray[np.bool_], outputs: StepOutputs
) -> None:
    """Give each request its first `kept` of `tokens`, to its row where that is still its own."""
    if live.all():
        owners.append(step.sampled_rows, tokens, kept)
    else:
        owners.append(step.sampled_rows[live], tokens[live], kept[live])
        for i in np.flatnonzero(~live):
            step.sampled_requests[i].output_token_ids.extend(tokens[i, : kept[i]].tolist())
    if tokens.shape[1] == 1 and kept.all():
        outputs.add_tokens(step.sampled_ids, tokens[:, 0].tolist())
    else:
        ids = [name for name, n in zip(step.sampled_ids, kept.tolist()) for _ in range(n)]
        outputs.add_tokens(ids, tokens[np.arange(tokens.shape[1]) < kept[:, None]].tolist())


def _take_logprobs(step: ScheduledStep, result: StepResult, outputs: StepOutputs) -> None:
    if result.logprobs is not None:
        for i, request in enumerate(step.sampled_requests):
            count = request.params.logprobs
            if count is not None and request.status is not RequestStatus.FINISHED and not result.failed[i]:
                outputs.logprobs[request.request_id] = _row(result.logprobs, i, count)
    if result.prompt_logprobs is not None:
        i = 0
        for request, num_tokens in step.prompt_logprob_counts:
            count = request.params.prompt_logprobs
            if count is not None and request.status is not RequestStatus.FINISHED:
                pieces = [_row(result.prompt_logprobs, j, count) for j in range(i, i + num_tokens)]
                outputs.prompt_logprobs[request.request_id] = pieces
            i += num_tokens


def _row(arrays: LogprobArrays, i: int, count: int) -> TokenLogprobs:
    ids, values = arrays.ids[i, : count + 1], arrays.values[i, : count + 1]
    return TokenLogprobs(ids.tolist(), values.tolist(), int(arrays.rank[i]))
