"""What a request may ask for. Names and meanings follow vLLM's `SamplingParams`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from rapid_infer.errors import RequestError
from rapid_infer.fields import check_fields, plain, unknown_field, wrong_field

FORMS = ("json", "json_object", "regex", "choice", "grammar")
"""What `structured_outputs` may hold an output to."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""

MAX_LOGPROBS = 20

MAX_N = 16384

MAX_LOGIT_BIAS = 1024
"""Entries. The device has room for as many in every row, as it has for `MAX_STOP_TOKEN_IDS`."""

MAX_STOP_TOKEN_IDS = 128
"""Of one request, the model's own and those of stop strings included."""

MAX_INT, MAX_FLOAT = 2**63 - 1, sys.float_info.max

Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number in [-2, 2]")]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AllowedTokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1, description="a list of at least one token id")]
StopTokenIds = Annotated[
    tuple[TokenId, ...],
    Meta(max_length=MAX_STOP_TOKEN_IDS, description=f"a list of at most {MAX_STOP_TOKEN_IDS} token ids >= 0"),
]
StopTexts = Annotated[
    tuple[Annotated[str, Meta(min_length=1)], ...], Meta(description="a text or a list of non-empty texts")
]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[
    Mapping[TokenId, Bias],
    Meta(
        max_length=MAX_LOGIT_BIAS,
        description=f"{{token id: number in [-100, 100]}} with at most {MAX_LOGIT_BIAS} entries",
    ),
]
StructuredOutputs = Annotated[Mapping[str, Any], Meta(description=f"a dict with one of the keys ({', '.join(FORMS)})")]


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
    structured_outputs   the form that the text must have: one of {"json": schema}, {"json_object": True},
                         {"regex": text}, {"choice": [texts]} and {"grammar": Lark}; needs llguidance
    """

    temperature: Annotated[float, Meta(ge=0, le=MAX_FLOAT, description="a number >= 0")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT, description="an integer >= 1, or 0 or -1 for off")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number in (0, 1]")] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number in [0, 1]")] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_FLOAT, description="a number > 0")] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT, description="a 64-bit integer")] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT, description="an integer >= 1")] | None = 16
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT, description="an integer >= 0")] = 0
    stop: StopTexts = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, () if (value := getattr(self, name)) is None else _as_tuple(value))
        object.__setattr__(self, "allowed_token_ids", _as_tuple(self.allowed_token_ids))
        check_fields(self, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.structured_outputs is not None:
            if not _is_form(self.structured_outputs):
                raise wrong_field(self, "structured_outputs", RequestError)
            for name in ("min_tokens", "allowed_token_ids"):
                if getattr(self, name):
                    raise RequestError(f"{name} cannot be used with structured_outputs: both limit the next token")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from untyped keys; an unknown key is a RequestError that names near matches."""
        if unknown := unknown_field(cls, values):
            raise RequestError(f"unknown sampling parameter {unknown}")
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


def _as_tuple(value: Any) -> Any:
    """Lists become tuples, one text a tuple of it; what cannot be listed is left for `check_fields` to refuse."""
    if isinstance(value, str):
        return (value,)
    value = plain(value)
    return tuple(value) if isinstance(value, Iterable) else value


def _is_form(value: Mapping[str, Any]) -> bool:
    if sum(name in value for name in FORMS) != 1:
        return False
    choice = value.get("choice", ("",))
    return (
        isinstance(value.get("json", {}), Mapping | str)
        and value.get("json_object", True) is True
        and all(isinstance(value.get(name, ""), str) for name in ("regex", "grammar"))
        and isinstance(choice, Sequence)
        and not isinstance(choice, str)
        and len(choice) > 0
        and all(isinstance(one, str) for one in choice)
    )
