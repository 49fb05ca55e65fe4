"""A model's chat template: which names it reads, and the text it makes of a conversation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from rapid_infer.errors import RequestError
from rapid_infer.params import SamplingParams

_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **template_kwargs: Any,
) -> str:
    """Text of a conversation, by a tokenizer of transformers. The arguments are those of `LLM.encode_chat`."""
    _check_messages(messages)
    for name, flag in (
        ("add_generation_prompt", add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        if not isinstance(flag, bool | None):
            raise RequestError(f"{name} must be True or False, got {flag!r:.80}")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "got both add_generation_prompt=True, which begins a new answer, and continue_final_message=True, which "
            "goes on with the last message: expected at most one of them"
        )
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise RequestError(f"chat_template_kwargs must be a dict of names and values, got {chat_template_kwargs!r:.80}")
    values = {**(chat_template_kwargs or {}), **template_kwargs}
    if not (chat_template or tokenizer.chat_template):
        raise RequestError("this model has no chat template; give a plain prompt instead")
    try:
        template = tokenizer.get_chat_template(chat_template, values.get("tools"))
        _check_names(values, _variables(template))
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        return tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **values,
        )
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error


def template_text(tokenizer: Any) -> str:
    """The chat template that a conversation with tools would get; empty where there is none."""
    return tokenizer.get_chat_template(None, [{}]) if tokenizer.chat_template else ""


def template_names(tokenizer: Any) -> frozenset[str]:
    """What that template reads beside the messages. RequestError for one that cannot be read."""
    try:
        return _variables(template_text(tokenizer))
    except Exception as error:
        raise RequestError(f"the chat template cannot be read: {type(error).__name__}: {error}") from error


def _check_messages(messages: object) -> None:
    expected = 'expected a list such as [{"role": "user", "content": "..."}]'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a list of messages, got {messages!r:.80}: {expected}")
    if not messages:
        raise RequestError("the conversation is empty: got 0 messages, expected at least 1")
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(f"a message is a dict with role and content, got {message!r:.80}: {expected}")


def _check_names(values: Mapping[str, Any], known: frozenset[str]) -> None:
    """A name that the template does not read would change nothing, and nobody would notice."""
    for name in values:
        if name in known:
            continue
        if name in {field.name for field in dataclasses.fields(SamplingParams)}:
            raise RequestError(f"{name} is a sampling parameter: pass sampling_params=SamplingParams({name}=...)")
        near = get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        reads = ", ".join(sorted(known)) or "nothing but the messages"
        raise RequestError(f"this model's chat template knows no {name!r}: {hint}It reads {reads}")


@lru_cache
def _variables(template: str) -> frozenset[str]:
    """Names that a template looks up and does not set itself."""
    from jinja2 import Environment, meta

    # transformers adds a tag to the language, which has no part in what is looked up.
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", template))
    return frozenset(meta.find_undeclared_variables(parsed)) - {"messages", "namespace", "range", "raise_exception"}
