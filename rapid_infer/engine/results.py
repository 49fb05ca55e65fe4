"""Takes a step's results back to the requests they were launched for, and says which of them end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rapid_infer.engine.launch import Launch
from rapid_infer.engine.request import Request, RequestStatus
from rapid_infer.engine.scheduler import Scheduler
from rapid_infer.engine.step_plan import LogprobArrays, StepResult
from rapid_infer.outputs import FinishReason

NON_FINITE = "the model gave non-finite logits (NaN or infinity) for this request"


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
    """New tokens as parallel lists (a request at most once per step), and the requests that ended. Only `add` changes
    the lists, which others may hold.

    `logprobs` and `prompt_logprobs` hold only requests that asked for them; those of the prompt come in order, in
    pieces. `num_cached_tokens` holds the requests that have just started.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)

    def add(self, request_ids: list[str], token_ids: list[int]) -> None:
        """The lists are kept as they are where there is nothing yet: a steady batch gives the same ids each time."""
        self.request_ids = self.request_ids + request_ids if self.request_ids else request_ids
        self.token_ids = self.token_ids + token_ids if self.token_ids else token_ids

    def end(self, request: Request) -> None:
        assert request.finish_reason is not None
        cached = request.num_cached_tokens or 0
        self.finished.append(Finished(request.request_id, request.finish_reason, request.error, cached))


def apply(scheduler: Scheduler, launch: Launch, result: StepResult, outputs: StepOutputs) -> None:
    """Append the sampled tokens of `launch` and finish what they end. Late results of ended requests are dropped."""
    _take_logprobs(launch, result, outputs)
    for request in launch.admitted:
        outputs.num_cached_tokens[request.request_id] = request.num_cached_tokens or 0
    if (steady := scheduler.steady_batch(launch)) is not None:
        taken = steady.take(result)
        if taken is not None:
            outputs.add(launch.sampled_ids, taken)
            return
        scheduler.end_steady()
    rows, owners = launch.sampled_rows, scheduler.rows
    requests, ids, tokens = launch.sampled_requests, launch.sampled_ids, result.token_ids
    live = owners.epoch[rows] == launch.epochs
    if not (live.all() and not result.failed.any()):
        _apply_others(scheduler, requests, result, live, outputs)
        live &= ~result.failed
        requests = [requests[i] for i in np.flatnonzero(live)]
        ids = [request.request_id for request in requests]
        rows, tokens = rows[live], tokens[live]
    owners.collected[rows] += 1
    stopped = (owners.stop[rows] == tokens[:, None]).any(axis=1)
    ended = stopped | (owners.collected[rows] >= owners.limit[rows])
    values = tokens.tolist()
    for request, token in zip(requests, values):
        request.output_token_ids.append(token)
    outputs.add(ids, values)
    for i in np.flatnonzero(ended):
        scheduler.finish(requests[i], FinishReason.STOP if stopped[i] else FinishReason.LENGTH)
        outputs.end(requests[i])


def _take_logprobs(launch: Launch, result: StepResult, outputs: StepOutputs) -> None:
    if result.logprobs is not None:
        for i, request in enumerate(launch.sampled_requests):
            count = request.params.logprobs
            if count is not None and request.status is not RequestStatus.FINISHED and not result.failed[i]:
                outputs.logprobs[request.request_id] = _row(result.logprobs, i, count)
    if result.prompt_logprobs is not None:
        i = 0
        for request, scored in launch.scored:
            count = request.params.prompt_logprobs
            if count is not None and request.status is not RequestStatus.FINISHED:
                pieces = [_row(result.prompt_logprobs, j, count) for j in range(i, i + scored)]
                outputs.prompt_logprobs[request.request_id] = pieces
            i += scored


def _row(arrays: LogprobArrays, i: int, count: int) -> TokenLogprobs:
    ids, values = arrays.ids[i, : count + 1], arrays.values[i, : count + 1]
    return TokenLogprobs(ids.tolist(), values.tolist(), int(arrays.rank[i]))


def _apply_others(
    scheduler: Scheduler, requests: list[Request], result: StepResult, live: np.ndarray, outputs: StepOutputs
) -> None:
    """Rows with non-finite logits, and requests that were preempted or ended while the step was in flight."""
    for i in np.flatnonzero(~live | result.failed):
        request = requests[i]
        if request.status is RequestStatus.FINISHED:
            continue
        if not live[i]:
            request.in_flight -= 1
        if result.failed[i]:
            scheduler.finish(request, FinishReason.ERROR, NON_FINITE)
            outputs.end(request)
            continue
        token = int(result.token_ids[i])
        request.output_token_ids.append(token)
        outputs.add([request.request_id], [token])
        if token in request.stop_token_ids or request.num_tokens >= request.limit:
            reason = FinishReason.STOP if token in request.stop_token_ids else FinishReason.LENGTH
            scheduler.finish(request, reason)
            outputs.end(request)
