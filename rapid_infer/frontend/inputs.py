"""From what a user asks to what the engine takes."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rapid_infer.engine.request import Request, outside_vocabulary, validate_prompt
from rapid_infer.engine.step_plan import I32
from rapid_infer.errors import RequestError
from rapid_infer.fields import check_text, plain
from rapid_infer.outputs import RequestOutputKind
from rapid_infer.params import MAX_STOP_TOKEN_IDS, SamplingParams
from rapid_infer.text import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class EngineInfo:
    """What the front must know of the engine, which may be another process.

    `stop_token_ids` are the model's own; the front's are those and its tokenizer's, see `InputProcessor`.
    `default_sampling_params`: fields of SamplingParams that the model recommends. The parsers are those that the
    model's class asks for.
    """

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    seed: int
    enable_prefix_caching: bool
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    max_num_seqs: int = 256
    tool_parser: str | None = None
    reasoning_parser: str | None = None


def possible_stops(info: EngineInfo, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The stop tokens of model and tokenizer that the model can give."""
    stop = info.stop_token_ids + (() if tokenizer is None else tokenizer.stop_token_ids)
    # Files and tokenizers name ids that the model cannot give, -1 for none among them.
    return tuple(token for token in dict.fromkeys(stop) if 0 <= token < info.vocab_size)


class InputProcessor:
    """Tokenizes, validates, and numbers requests in order of arrival, from `first_arrival` on."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None, first_arrival: int = 0) -> None:
        self.info = replace(info, stop_token_ids=possible_stops(info, tokenizer))
        self.tokenizer = tokenizer
        self._arrivals = first_arrival

    @contextmanager
    def forgetting_refused(self) -> Iterator[None]:
        """Requests made in here that end in a RequestError are not counted.

        Seeds follow from how many came before: what never ran must not change those of others.
        """
        arrivals = self._arrivals
        try:
            yield
        except RequestError:
            self._arrivals = arrivals
            raise

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `changes` field by field."""
        return SamplingParams.from_dict({**self.info.default_sampling_params, **changes})

    @staticmethod
    def check_call(request_id: str, output_kind: RequestOutputKind, in_use: Container[str]) -> None:
        """RequestError for an id that is no text or in use, and for what is no output kind."""
        if not isinstance(request_id, str):
            raise RequestError(f"a request id must be text, got {request_id!r:.80}")
        check_text("the request id", request_id, RequestError)
        if request_id in in_use:
            raise RequestError(f"request id {request_id!r} is in use; expected a new one")
        if not isinstance(output_kind, RequestOutputKind):
            kinds = ", ".join(map(str, RequestOutputKind))
            raise RequestError(f"output_kind must be one of {kinds}, got {output_kind!r:.80}")

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. RequestError when it is text and there is no tokenizer, or neither text nor ids."""
        return self.encode_all([prompt])[0]

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """As `encode`, for each of them; texts are tokenized together."""
        taken = [prompt if isinstance(prompt, str) else _token_ids(prompt) for prompt in prompts]
        texts = [prompt for prompt in taken if isinstance(prompt, str)]
        if texts and self.tokenizer is None:
            raise RequestError("got a text prompt, but skip_tokenizer_init=True: give token ids")
        encoded = iter(self.tokenizer.encode_all(texts) if self.tokenizer is not None else ())
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in taken]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; `options` are those of `LLM.encode_chat`. RequestError without a tokenizer."""
        if self.tokenizer is None:
            raise RequestError("a conversation needs the tokenizer, but skip_tokenizer_init=True")
        return self.tokenizer.encode_chat(messages, **options)

    def requests(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> list[Request]:
        """One engine request for each of the n completions.

        RequestError when the prompt can never run, or the engine cannot do what is asked.
        """
        prompt = self._pack(prompt_token_ids)
        validate_prompt(prompt, self.info.vocab_size, self.info.max_model_len)
        self._check(params)
        arrival = self._arrivals
        self._arrivals += 1
        made = [self._request(request_id, prompt, params, index, arrival) for index in range(params.n)]
        if (stops := len(made[0].stop_token_ids)) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"{stops} token ids would end the request, those of the model and of its stop strings included; "
                f"expected at most {MAX_STOP_TOKEN_IDS}: give fewer"
            )
        return made

    def _pack(self, ids: Sequence[int]) -> I32:
        try:
            return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)
        except struct.error:
            raise outside_vocabulary(max(ids, key=abs), self.info.vocab_size) from None

    def _check(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling parameters must be SamplingParams, got {type(params).__name__} {params!r:.80}: write "
                "SamplingParams(temperature=0), or SamplingParams.from_dict(...) for a dict"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need the tokenizer, but skip_tokenizer_init=True: use stop_token_ids")
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if token >= self.info.vocab_size:
                    highest = self.info.vocab_size - 1
                    raise RequestError(f"{name} holds {token}, outside the vocabulary: expected 0 to {highest}")

    def _request(self, request_id: str, prompt: I32, params: SamplingParams, index: int, arrival: int) -> Request:
        info = self.info
        limit = info.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        salt: bytes | None = b""
        if not info.enable_prefix_caching:
            # Without prefix caching the n rows of one prompt still share its blocks, but only with each other.
            salt = f"request {arrival}".encode() if params.n > 1 else None
        if index > 0 and params.prompt_logprobs is not None:
            # The first completion scores the prompt for all of them, and the others may share its blocks.
            params = replace(params, prompt_logprobs=None)
        stop = (() if params.ignore_eos else info.stop_token_ids) + params.stop_token_ids
        if params.stop and self.tokenizer is not None:
            stop += tuple(token for token in self.tokenizer.special_stops(params) if token < info.vocab_size)
        return Request(
            # The arrival keeps apart a discarded request, whose end is still to come, and a new one of the same name.
            request_id=f"{request_id}/{arrival}/{index}",
            prompt_token_ids=prompt,
            params=params,
            stop_token_ids=tuple(dict.fromkeys(stop)),
            limit=limit,
            seed=params.seed if params.seed is not None else mix_seed(info.seed, arrival),
            sample_index=index,
            cache_salt=salt,
        )


def _token_ids(prompt: Any) -> list[int]:
    """A prompt that is no text, as a list of Python's integers: lists, tuples, arrays and tensors of one dimension."""
    given = prompt.tolist() if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview) else prompt
    if isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview):
        ids = list(given)
        try:
            # The sum says of all at once whether they are Python's: looking at each takes longer than all else here.
            if not ids or (type(ids[0]) is type(ids[-1]) is int and type(sum(ids)) is int):
                return ids
        except TypeError:
            pass
        ids = plain(ids)
        if all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            return ids
    raise RequestError(f"a prompt must be text or a list of token ids, got {type(prompt).__name__} {prompt!r:.80}")


def mix_seed(seed: int, arrival: int) -> int:
    """A request's own seed from the engine's: distinct per arrival, within 64 signed bits."""
    return (seed * 0x9E3779B97F4A7C15 + arrival * 0xD1B54A32D192ED03 + 2**63) % 2**64 - 2**63
