"""What a user gets back. Names follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum


class FinishReason(StrEnum):
    """How a request ended; every request ends exactly once."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestOutputKind(Enum):
    """What `step()` returns for a request: all so far, only what is new (of the completions that have anything new,
    each with its `index`), or nothing before the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, its rank among all (1 is the likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]
"""Per position: token id -> Logprob, the chosen token first."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions. `token_ids` includes the stop token, `text` does not.

    stop_reason          the stop string or the `stop_token_ids` id that ended it; None for the model's own stop token
    logprobs             per token, if asked for; `cumulative_logprob` is the sum of the chosen ones
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its completions so far, or those of them that have something new.

    num_cached_tokens    prompt tokens whose keys and values were already cached
    finished             all completions have ended
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
