"""One sequence on its way through the engine. A prompt with n completions is n requests that share cache blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from rapid_infer.cache.prefix import HashExtra
from rapid_infer.engine.masks import TokenMask
from rapid_infer.engine.step_plan import I32
from rapid_infer.errors import RequestError
from rapid_infer.outputs import FinishReason
from rapid_infer.params import SamplingParams

if TYPE_CHECKING:
    from rapid_infer.engine.row_state import RowState


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """What the host knows of a sequence. While it runs, its counters and new tokens live in `rows`, at `row`.

    `prompt_token_ids` `[n]`, never written to. `seed` and `sample_index` key the sampler's noise. `limit`: the total
    length at which it ends. `cache_salt` None means that its blocks are not offered to others; equal ones may share,
    where `extras`, which tell apart what has equal ids, are equal too. `mask` limits what may be chosen. `in_flight`:
    tokens sampled but not collected when it was preempted. `num_planned_prompt_logprobs`: those
    of the prompt that are on their way, or given.
    """

    request_id: str
    prompt_token_ids: I32
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    limit: int
    seed: int = 0
    sample_index: int = 0
    cache_salt: bytes | None = b""
    extras: tuple[HashExtra, ...] = ()
    mask: TokenMask | None = None
    status: RequestStatus = RequestStatus.WAITING
    rows: RowState | None = None
    row: int = -1
    blocks: list[list[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    in_flight: int = 0
    num_planned_prompt_logprobs: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    _output: list[int] = field(default_factory=list)

    @property
    def output_token_ids(self) -> list[int]:
        """All that the host has seen. The list is the request's own: it has later ones once this is read again."""
        if self.rows is not None:
            first = len(self.prompt_token_ids) + len(self._output)
            self._output += self.rows.tokens[self.row, first : self.num_tokens].tolist()
        return self._output

    @property
    def num_tokens(self) -> int:
        """Prompt and output, as far as the host has seen it."""
        if self.rows is not None:
            return int(self.rows.collected[self.row])
        return len(self.prompt_token_ids) + len(self._output)

    @property
    def min_length(self) -> int:
        """Total length below which no stop token ends it."""
        return len(self.prompt_token_ids) + self.params.min_tokens

    @property
    def reads_cache(self) -> bool:
        """Whether cached blocks will do: prompt log-probabilities need every prompt token computed."""
        return self.params.prompt_logprobs is None

    def plan_prompt_logprobs(self, start: int, stop: int) -> tuple[int, int]:
        """Of positions `start..stop`, those after which log-probabilities are asked for now; each is given out once."""
        low = max(start, self.num_planned_prompt_logprobs)
        high = max(low, min(stop, len(self.prompt_token_ids) - 1))
        self.num_planned_prompt_logprobs = max(self.num_planned_prompt_logprobs, high)
        return low, high

    def tokens(self, start: int, stop: int) -> I32:
        """Known tokens `start..stop`, prompt and output as one sequence."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        output = np.array(self.output_token_ids[max(start - prompt, 0) : stop - prompt], np.int32)
        return output if start >= prompt else np.concatenate([self.prompt_token_ids[start:], output])


def validate_prompt(token_ids: I32, vocab_size: int, max_model_len: int) -> None:
    """RequestError when the prompt can never run."""
    if not len(token_ids):
        raise RequestError("the prompt is empty: got 0 tokens, expected at least 1")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but max_model_len={max_model_len} leaves room for at most "
            f"{max_model_len - 1} and one generated token; shorten it or raise max_model_len"
        )
    # As unsigned numbers, negative ones are the largest.
    extreme = int(token_ids[token_ids.view(np.uint32).argmax()])
    if not 0 <= extreme < vocab_size:
        raise outside_vocabulary(extreme, vocab_size)


def outside_vocabulary(token_id: int, vocab_size: int) -> RequestError:
    return RequestError(f"token id {token_id} is outside the vocabulary: expected 0 to {vocab_size - 1}")
