"""A conversation with a model: its history, its sampling parameters, and what fits. Knows no terminal."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapid_infer.errors import RequestError
from rapid_infer.outputs import FinishReason
from rapid_infer.params import SamplingParams

if TYPE_CHECKING:
    from rapid_infer.llm import LLM

ROOM = 8
"""One part in this many of the model's length is kept free for the answer, as long as there is history to drop."""

SHOWN = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens"),
)
"""Parameters that `describe` always shows; the others only when they do something."""


@dataclass
class Answer:
    """One answer. `finish_reason` None: stopped by the user. `error`: why it broke off; then nothing of it is kept."""

    text: str = ""
    tokens: int = 0
    first_token: float = 0.0
    seconds: float = 0.0
    finish_reason: str | None = None
    error: str | None = None

    def line(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        speed = f"{self.tokens} tokens in {self.seconds:.2f} s ({rate:.1f} tok/s)"
        return f"{speed}, first token after {self.first_token:.2f} s"


class ChatSession:
    """Asks `llm`, one question after the other. `note` is told, in words, what was done to make a question fit."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.params = params
        self.system = system
        self.exchanges: list[tuple[str, str]] = []
        self._llm = llm
        self._template = dict(template or {})
        self._note = note

    @property
    def limit(self) -> int:
        return self._llm.engine.inputs.info.max_model_len

    def ask(self, question: str, show: Callable[[str], None], stopped: Callable[[], bool] = lambda: False) -> Answer:
        """Answer a question; `show` gets the text as it comes, `stopped` is asked after each piece.

        The exchange joins the history, a stopped answer as far as it came. RequestError when the question cannot be
        asked. After any error the history is as before.
        """
        kept, ids = self._fit(question)
        start = time.perf_counter()
        pieces: Any = self._llm.stream(ids, self.params)
        if len(kept) < len(self.exchanges):
            self._note(_dropped(len(self.exchanges) - len(kept), self.limit))
        answer = Answer()
        try:
            for piece in pieces:
                (new,) = piece.outputs
                if not answer.tokens:
                    answer.first_token = time.perf_counter() - start
                answer.tokens += len(new.token_ids)
                answer.finish_reason, answer.error = new.finish_reason, new.error
                # Only the flush at the end can end in U+FFFD: a character whose other bytes will not come.
                text = new.text.rstrip("\ufffd") if new.finish_reason == FinishReason.LENGTH else new.text
                answer.text += text
                show(text)
                if stopped():
                    break
        finally:
            pieces.close()
        answer.seconds = time.perf_counter() - start
        if answer.error is None:
            self.exchanges = [*kept, (question, answer.text)] if answer.text else kept
        return answer

    def _fit(self, question: str) -> tuple[list[tuple[str, str]], list[int]]:
        """The latest exchanges that leave room for an answer, and the ids of the whole conversation."""
        room = max(1, min(self.params.max_tokens or self.limit, self.limit // ROOM))
        kept = list(self.exchanges)
        while True:
            ids = self._llm.encode_chat(self._messages(kept, question), **self._template)
            if len(ids) + room <= self.limit or not kept:
                return kept, ids
            del kept[0]

    def _messages(self, exchanges: list[tuple[str, str]], question: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for asked, answered in exchanges:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]

    def reset(self) -> int:
        """Forget the history, not the system message; returns how many exchanges that were."""
        forgotten, self.exchanges = len(self.exchanges), []
        return forgotten

    def change(self, text: str) -> None:
        """Set parameters from `name=value` pairs. RequestError, and nothing changed, when one of them is wrong."""
        changes = parse_pairs(text)
        if changes.get("n", 1) != 1:
            raise RequestError(f"a chat shows one answer at a time: n must stay 1, got {changes['n']!r}")
        self.params = SamplingParams.from_dict(_fields(self.params) | changes)

    def describe(self) -> str:
        """The parameters in the form that `change` reads."""
        defaults = _fields(SamplingParams())
        values = _fields(self.params)
        names = [*SHOWN, *(name for name in values if name not in SHOWN and values[name] != defaults[name])]
        return " ".join(f"{name}={json.dumps(values[name], ensure_ascii=False)}" for name in names)


def parse_pairs(text: str) -> dict[str, Any]:
    """`a=1 b=x y` as {"a": 1, "b": "x y"}: a value is JSON if it can be, else text, and ends where a `name=` begins."""
    pairs: dict[str, Any] = {}
    for part in re.split(r"\s+(?=\w+\s*=)", text.strip()):
        name, sign, value = part.partition("=")
        if not sign or not name.strip():
            raise RequestError(f"expected name=value, such as temperature=0.7, got {part!r}")
        try:
            pairs[name.strip()] = json.loads({"None": "null", "True": "true", "False": "false"}.get(value, value))
        except ValueError:
            pairs[name.strip()] = value.strip()
    return pairs


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def _dropped(count: int, limit: int) -> str:
    what = "the oldest exchange was" if count == 1 else f"the {count} oldest exchanges were"
    return f"the conversation has outgrown the {limit} tokens that fit: {what} dropped"
