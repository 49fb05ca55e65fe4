"""Text of one completion, token by token: a character is shown when all its bytes are there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product, takewhile
from operator import eq
from typing import Any

_TAIL = 8
"""Prompt tokens that the decoder sees: enough for an unfinished character, of at most four bytes, and a word before."""

_BYTES = 4

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Stream decoder over a `tokenizers.Tokenizer`. The pieces it returns, with the flush, add up to the whole text.

    The text continues the prompt: it is what prompt and completion together have beyond the text of the prompt. So a
    space that belongs between the two is part of it, and a character whose first bytes end the prompt is part of it
    once it is complete. A step looks at a few tokens, however many there are and whatever they hold.

    `texts` remembers what tokens add to a text, for all completions with the same backend and `skip_special_tokens`;
    only for a decoder of which `adds_the_same_everywhere` holds.
    """

    def __init__(
        self,
        backend: Any,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        texts: dict[int, str] | None = None,
    ) -> None:
        self._backend = backend
        self._texts = texts
        self._skip = skip_special_tokens
        # Text of a token depends on whether one stands before it, so the last ones that were shown are kept.
        self._context, self._pending = self._split(list(prompt_token_ids[-_TAIL:]))
        self._before = self._decode(self._context)
        self._of_prompt = self._decode(self._pending)

    def _split(self, tail: list[int]) -> tuple[list[int], list[int]]:
        """Tokens that are whole characters, and those after them."""
        for first, left_out in product(range(_BYTES), range(_BYTES)):
            last = max(len(tail) - left_out, first)
            text = self._decode(tail[first:last])
            if not text.startswith(_UNFINISHED) and not text.endswith(_UNFINISHED):
                return tail[first:last], tail[last:]
        return [], tail

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        before = self._before
        if (texts := self._texts) is not None and before and not self._pending:
            pieces = [texts.get(token) for token in token_ids]
            if None not in pieces:
                return "".join(pieces)  # type: ignore[arg-type]
        tokens = [*self._pending, *token_ids]
        text = self._decode(self._context + tokens)
        if text.startswith(before) and text.find(_UNFINISHED, len(before)) < 0:
            known = texts is not None and before and _UNFINISHED not in before
            if texts is not None and known and len(tokens) == 1:
                texts[tokens[0]] = text[len(before) :]
            # A special token that is left out need not be kept; before the first text it may be a space to come.
            kept = len(text) > len(before) or self._pending or (not before and len(self._context) < _TAIL)
            self._pending = []
            if kept and not known:
                self._context += tokens
                self._before = text
                if len(self._context) > _TAIL:
                    self._keep_last(tokens)
            return self._new(text[len(before) :])
        if len(token_ids) > 1:
            return "".join(self.add([token]) for token in token_ids)
        self._pending = tokens
        if text.endswith(_UNFINISHED):
            return self._cut() if len(tokens) >= _BYTES else ""
        text = self._after(self._context, tokens)
        self._keep_last(tokens)
        return self._new(text)

    def _keep_last(self, tokens: list[int]) -> None:
        """All of `tokens` is shown: the last whole characters of it are what the next ones are seen after."""
        self._pending = []
        for count in (*range(1, _BYTES + 1), len(tokens)) if len(tokens) > _BYTES else (len(tokens),):
            self._context = tokens[-count:]
            self._before = self._decode(self._context)
            if self._before and _UNFINISHED not in self._before:
                return

    def _cut(self) -> str:
        """Too many tokens for one character wait: show what no later byte can change, all but the last U+FFFD."""
        context = self._context
        pending = self._pending = [token for token in self._pending if self._decode([token])]
        if len(pending) < _BYTES:
            return ""
        text = self._after(context, pending)
        for count in range(len(pending)):
            head, tail = self._after(context, pending[:count]), self._decode(pending[count:])
            if not tail.endswith(_UNFINISHED):
                # A byte that fits no character spoils its whole run of byte tokens, but not what comes after it alone.
                self._keep_last(pending[count:])
                return self._new(head + tail)
            if head and head != text and text.startswith(head):
                self._context, self._before = pending[:count], self._decode(pending[:count])
                self._pending = pending[count:]
                return self._new(head)
        return ""

    def _after(self, context: list[int], tokens: list[int]) -> str:
        """What `tokens` add to the text of `context`; what was shown stays, whatever they do to it."""
        before, text = self._decode(context), self._decode(context + tokens)
        return text[len(before) :] if text.startswith(before) else self._decode(tokens)

    def _new(self, text: str) -> str:
        """`text` without what the prompt has of it."""
        if not self._of_prompt:
            return text
        shown = sum(takewhile(bool, map(eq, self._of_prompt, text)))
        self._of_prompt = self._of_prompt[shown:] if shown == len(text) else ""
        return text[shown:]

    def flush(self) -> str:
        """What is left when no more tokens come: a character cut short shows as U+FFFD."""
        tail = self._after(self._context, self._pending)
        self._pending = []
        return self._new(tail)


def adds_the_same_everywhere(backend: Any) -> bool:
    """Whether each token but the first of a text adds the same to it, unless bytes are missing."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    return all(
        part.get("type") in ("ByteLevel", "Metaspace", "ByteFallback", "Fuse")
        or (part.get("type") == "Replace" and len(part["pattern"].get("String", "")) == 1)
        or (part.get("type") == "Strip" and part["stop"] == 0)
        for part in decoder.get("decoders", [decoder])
    )
