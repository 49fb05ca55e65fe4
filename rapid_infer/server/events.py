"""Answers as OpenAI writes them: usage, log-probabilities, and server-sent events put together from bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from rapid_infer.outputs import Logprob, Logprobs

DONE = b"data: [DONE]\n\n"

_LOWEST = -9999.0
"""In place of minus infinity, which JSON has not."""

encode = msgspec.json.Encoder().encode


class Events:
    """The events of one streamed answer: the same head in all of them."""

    def __init__(self, request_id: str, kind: str, created: int, model: str) -> None:
        head = encode({"id": request_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['

    def event(self, choice: bytes, usage: bytes | None = None) -> bytes:
        """One event with one choice, as JSON, or none."""
        tail = b"]}\n\n" if usage is None else b'],"usage":' + usage + b"}\n\n"
        return self._head + choice + tail

    @staticmethod
    def error(body: dict[str, Any]) -> bytes:
        return b"data: " + encode(body) + b"\n\n"


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _finite(value: float) -> float:
    return max(value, _LOWEST)


def _best(at: dict[int, Logprob], count: int) -> list[Logprob]:
    """The likeliest ones, in order."""
    return sorted(at.values(), key=lambda one: one.rank)[:count]


def _token(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "logprob": _finite(one.logprob), "bytes": list(text.encode())}


def chat_logprobs(positions: Logprobs | None, count: int) -> dict[str, Any] | None:
    """Of a chat: each token with its text and bytes, and `count` alternatives."""
    if positions is None:
        return None
    content = []
    for at in positions:
        chosen = next(iter(at.values()))
        content.append({**_token(chosen), "top_logprobs": [_token(one) for one in _best(at, count)]})
    return {"content": content, "refusal": None}


def text_logprobs(
    positions: Iterable[dict[int, Logprob] | None], count: int, offset: int, first: str = ""
) -> tuple[dict[str, Any], int]:
    """Of a completion: parallel lists, and the offset after the last token.

    None: the first token of a prompt, whose text is `first`, and which has no value.
    """
    found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for at in positions:
        chosen = next(iter(at.values())) if at else None
        text = (chosen.decoded_token or "") if chosen else first
        found["text_offset"].append(offset)
        found["tokens"].append(text)
        found["token_logprobs"].append(_finite(chosen.logprob) if chosen else None)
        best = {one.decoded_token or "": _finite(one.logprob) for one in _best(at, count)} if at else None
        if best is not None and chosen is not None:
            best.setdefault(text, _finite(chosen.logprob))
        found["top_logprobs"].append(best)
        offset += len(text)
    return found, offset


def prompt_logprobs(positions: list[dict[int, Logprob] | None] | None) -> list[Any] | None:
    """As vLLM writes them: per position, token id -> its values."""
    if positions is None:
        return None
    return [
        None
        if at is None
        else {
            str(token): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in at.items()
        }
        for at in positions
    ]
