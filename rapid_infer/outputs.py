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
    """What `step()` returns for a request: all so far, only what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions. `token_ids` includes the stop token, `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its completions so far. `num_cached_tokens`: prompt tokens whose keys and values were already
    cached.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)
