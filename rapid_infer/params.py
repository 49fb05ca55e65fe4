"""What a request may ask for. Names and meanings follow vLLM's `SamplingParams`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rapid_infer.errors import RequestError
from rapid_infer.fields import PLAIN, check_text, plain

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""

MAX_LOGPROBS = 20

MAX_N = 16384

MAX_LOGIT_BIAS = 1024
"""Entries. The device has room for as many in every row, as it has for `MAX_STOP_TOKEN_IDS`."""

MAX_STOP_TOKEN_IDS = 128
"""Of one request, the model's own and those of stop strings included."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. RequestError for a value out of range.

    temperature          0 is greedy; otherwise logits are divided by it
    top_k                keep the k most likely tokens; 0 or -1 keeps all
    top_p                keep the smallest set of tokens whose probability reaches this, in (0, 1]
    min_p                keep tokens at least this likely, relative to the most likely one; in [0, 1]
    repetition_penalty   above 1 makes tokens of the prompt or the output less likely, below 1 more
    presence_penalty     subtracted from the logit of every token in the output; in [-2, 2]
    frequency_penalty    subtracted once for each time a token is in the output; in [-2, 2]
    logit_bias           {token id: number added to its logit}, in [-100, 100]; at most 1024 entries
    allowed_token_ids    nothing but these can be chosen
    seed                 same seed, same tokens; None: the engine's seed plus the request's arrival number
    n                    how many completions of the one prompt, at most 16384; they share its cache blocks
    max_tokens           tokens to generate at most; None means up to the model's length
    min_tokens           no stop token and no stop string ends the request before this many tokens
    stop                 texts that end the request; they are no part of its text
    stop_token_ids       ids that end the request besides the model's own stop tokens; at most 128 in all
    ignore_eos           go on past the model's own stop tokens (`stop_token_ids` still stop)
    include_stop_str_in_output  keep the stop string, or the stop token's text, at the end of the text
    skip_special_tokens  leave special tokens out of the text
    logprobs             give the log-probabilities of this many tokens per step, and of the chosen one; at most 20
    prompt_logprobs      the same for the tokens of the prompt; such a request reads no cached prefix
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in _RULES:
            if type(value := getattr(self, name)) not in PLAIN:
                object.__setattr__(self, name, plain(value))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            object.__setattr__(self, name, () if value is None else _as_tuple(value))
        object.__setattr__(self, "allowed_token_ids", _as_tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _int_keys(self.logit_bias))
        for name, (holds, expected) in _RULES.items():
            value = getattr(self, name)
            if not holds(value):
                raise RequestError(f"{name} must be {expected}, got {shortened(value)}")
        for stop in self.stop:
            check_text("stop", stop, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from untyped keys; an unknown key is a RequestError that names near matches."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                near = get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise RequestError(f"unknown sampling parameter {key!r}: {hint}Known: {', '.join(names)}")
        return cls(**values)


def defaults_of(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that a model's generation_config.json sets. `do_sample: false` is temperature 0."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    found = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def shortened(value: object) -> str:
    """For a message; a long list or dict is told by its beginning and its length."""
    text = repr(value)
    return text if len(text) <= 200 or not isinstance(value, Sized) else f"{text:.100}... ({len(value)} entries)"


def _as_tuple(value: Any) -> Any:
    """Lists become tuples, one text a tuple of it; what cannot be listed is left for the rules to refuse."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def _int_keys(bias: Any) -> dict[int, float]:
    """JSON has only text keys; ids may come as text."""
    try:
        return {key if _is_int(key, -math.inf, math.inf) else int(_text(key)): value for key, value in bias.items()}
    except (AttributeError, TypeError, ValueError):
        raise RequestError(f"logit_bias must map token ids to numbers, got {bias!r}") from None


def _text(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError
    return key


def _is_int(value: object, low: float = -(2**63), high: float = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    return (_is_int(value) or (isinstance(value, float) and math.isfinite(value))) and low <= value <= high  # type: ignore[operator]


def _ids(values: object) -> bool:
    return isinstance(values, tuple) and all(_is_int(i, 0, 2**31 - 1) for i in values)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: _is_number(v, 0), "a number >= 0"),
    "top_k": (lambda v: _is_int(v, -1), "an integer >= 1, or 0 or -1 for off"),
    "top_p": (lambda v: _is_number(v, 0, 1) and v > 0, "a number in (0, 1]"),
    "min_p": (lambda v: _is_number(v, 0, 1), "a number in [0, 1]"),
    "repetition_penalty": (lambda v: _is_number(v, 0) and v > 0, "a number > 0"),
    "presence_penalty": (lambda v: _is_number(v, -2, 2), "a number in [-2, 2]"),
    "frequency_penalty": (lambda v: _is_number(v, -2, 2), "a number in [-2, 2]"),
    "logit_bias": (
        lambda v: (
            not v or (len(v) <= MAX_LOGIT_BIAS and _ids(tuple(v)) and all(_is_number(b, -100, 100) for b in v.values()))
        ),
        f"{{token id: number in [-100, 100]}} with at most {MAX_LOGIT_BIAS} entries",
    ),
    "allowed_token_ids": (lambda v: v is None or (v != () and _ids(v)), "a list of at least one token id, or None"),
    "seed": (lambda v: v is None or _is_int(v, -(2**63), 2**63 - 1), "a 64-bit integer or None"),
    "n": (lambda v: _is_int(v, 1, MAX_N), f"an integer from 1 to {MAX_N}"),
    "max_tokens": (lambda v: v is None or _is_int(v, 1), "an integer >= 1 or None"),
    "min_tokens": (lambda v: _is_int(v, 0), "an integer >= 0"),
    "stop": (
        lambda v: isinstance(v, tuple) and all(isinstance(s, str) and s for s in v),
        "a text or a list of non-empty texts",
    ),
    "stop_token_ids": (
        lambda v: _ids(v) and len(v) <= MAX_STOP_TOKEN_IDS,
        f"a list of at most {MAX_STOP_TOKEN_IDS} token ids >= 0",
    ),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "include_stop_str_in_output": (lambda v: isinstance(v, bool), "true or false"),
    "skip_special_tokens": (lambda v: isinstance(v, bool), "true or false"),
    "logprobs": (lambda v: v is None or _is_int(v, 0, MAX_LOGPROBS), f"an integer from 0 to {MAX_LOGPROBS}, or None"),
    "prompt_logprobs": (
        lambda v: v is None or _is_int(v, 0, MAX_LOGPROBS),
        f"an integer from 0 to {MAX_LOGPROBS}, or None",
    ),
}
