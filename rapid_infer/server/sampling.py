"""From the fields of a request to `SamplingParams`, with errors that name the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from rapid_infer.errors import RequestError
from rapid_infer.params import MAX_LOGPROBS, SamplingParams
from rapid_infer.server.errors import invalid, of_request_error
from rapid_infer.server.schema import ChatRequest, CompletionRequest, Sampling
from rapid_infer.server.served import Served

PARAMS = frozenset(one.name for one in dataclasses.fields(SamplingParams))

_SAME = tuple(name for name in Sampling.__struct_fields__ if name in PARAMS and name != "max_tokens")

_REFUSED = {
    "guided_grammar": "give guided_json, guided_regex or guided_choice",
    "use_beam_search": "there is no beam search; n gives several completions",
    "suffix": "text cannot be completed towards a suffix",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "chat_template": "the template is the server's; chat_template_kwargs may hold what it reads",
    "audio": "this model writes text alone",
}

COMPLETION_TOKENS = 16
"""What OpenAI gives a completion that says nothing; a chat goes on to the model's length."""


def refuse_unsupported(body: Sampling) -> None:
    """ApiError for a field that would change the answer and cannot be honoured."""
    for name, why in _REFUSED.items():
        # False, null and [] ask for nothing.
        if getattr(body, name, None):
            raise invalid(name, f"{name} is not supported: {why}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true")


def sampling_params(served: Served, body: CompletionRequest | ChatRequest, **more: Any) -> SamplingParams:
    """ApiError for a value out of range. `more` wins."""
    refuse_unsupported(body)
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    given["max_tokens"] = _max_tokens(served, body)
    field, spec = structured(body)
    if spec is not None:
        given["structured_outputs"] = spec
    try:
        return served.llm.default_sampling_params(**{**given, **more})
    except RequestError as error:
        if str(error).startswith("structured_outputs "):
            raise invalid(field, str(error).replace("structured_outputs", field, 1)) from None
        raise of_request_error(error, PARAMS, "body") from None


def _max_tokens(served: Served, body: CompletionRequest | ChatRequest) -> int | None:
    """The smaller of what is asked for, else the model's own default; never more than the server gives."""
    asked = [body.max_tokens]
    if isinstance(body, ChatRequest):
        asked.append(body.max_completion_tokens)
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(body, name)
            if value is not None and value < 1:
                raise invalid(name, f"{name} must be at least 1, got {value}")
    limits = [one for one in asked if one is not None]
    if not limits:
        default = served.llm.default_sampling_params(max_tokens=served.llm.recommended.get("max_tokens"))
        limits = [default.max_tokens] if default.max_tokens is not None else []
        if not limits and isinstance(body, CompletionRequest):
            limits = [COMPLETION_TOKENS]
    if served.settings.max_output_tokens is not None:
        limits.append(served.settings.max_output_tokens)
    return min(limits, default=None)


def structured(body: Sampling) -> tuple[str, dict[str, Any] | None]:
    """The field that limits the output's form, and what it says, as `SamplingParams.structured_outputs`.

    ApiError when two fields do.
    """
    found: dict[str, dict[str, Any]] = {}
    form = body.response_format
    if form is not None and form.type == "json_object":
        found["response_format"] = {"json_object": True}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema is None:
            raise invalid("response_format", "response_format.json_schema.schema is missing")
        found["response_format"] = {"json": form.json_schema.schema}
    elif form is not None and form.type != "text":
        raise invalid(
            "response_format",
            f"response_format.type must be text, json_object or json_schema, got {form.type!r:.80}",
        )
    if body.structured_outputs is not None:
        if body.structured_outputs.grammar is not None:
            raise invalid("structured_outputs", "structured_outputs.grammar is not supported")
        given = msgspec.structs.asdict(body.structured_outputs)
        kept = {key: value for key, value in given.items() if value is not None and value is not False}
        if len(kept) != 1:
            raise invalid(
                "structured_outputs",
                f"structured_outputs takes one of json, regex, choice and json_object, got {len(kept)}",
            )
        found["structured_outputs"] = kept
    for kind in ("json", "regex", "choice"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            if value == []:
                raise invalid(f"guided_{kind}", f"guided_{kind} is empty; expected at least one text")
            found[f"guided_{kind}"] = {kind: value}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid(second, f"{first} and {second} both limit the form of the output; give one of them")
    return next(iter(found.items()), ("structured_outputs", None))


def check_model(served: Served, name: str | None) -> None:
    """ApiError 404 for a model that is not served here."""
    from rapid_infer.server.errors import ApiError

    if name is not None and name not in served.settings.served_names:
        raise ApiError(
            404,
            f"the model {name!r:.200} is not served here; this server has {', '.join(served.settings.served_names)}",
            param="model",
            code="model_not_found",
        )


def check_top_logprobs(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise invalid(name, f"{name} must be an integer from 0 to {MAX_LOGPROBS}, got {value}")
