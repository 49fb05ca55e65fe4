"""A step in flight, as the engine remembers it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rapid_infer.engine.request import Request
from rapid_infer.engine.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step's plan and whom its results are for, as of the time it was planned.

    `admitted` start with it; `failed` end with an error whatever its results are. `sampled_requests` and their ids
    stand in the order of `StepPlan.sampled`, as do `most`, how many tokens each of them may get, and what ends it:
    `limits`, its total length, and `stop_ids` `[S, k]`, -1 where unused, None where nobody has any. `gated`: rows that
    get a token and whose masks follow the tokens of the steps before, which the host may not have seen yet.
    """

    plan: StepPlan
    requests: list[Request]
    sampled_requests: list[Request]
    sampled_ids: list[str]
    sampled_rows: NDArray[np.int64]
    epochs: NDArray[np.int64]
    most: NDArray[np.int64]
    limits: NDArray[np.int64]
    stop_ids: NDArray[np.int64] | None
    prompt_logprob_counts: list[tuple[Request, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    gated: list[tuple[int, Request]] = field(default_factory=list)
