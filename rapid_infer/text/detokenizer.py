"""Text of one completion, token by token: a character is shown when all its bytes are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_TAIL = 8
"""Prompt tokens that the decoder sees: enough for an unfinished character, which has at most four bytes, and for the
word before.
"""

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Stream decoder over a `tokenizers.Tokenizer`. The pieces it returns, with the flush, add up to the whole text.

    The text continues the prompt: a space that belongs between the two is part of it, and a character whose first bytes
    end the
    prompt is part of it once it is complete.
    """

    def __init__(self, backend: Any, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = backend
        self._skip = skip_special_tokens
        self._ids = list(prompt_token_ids[-_TAIL:])
        before = self._decode() if self._ids else ""
        # DecodeStream repeats the whole prefix when it ends inside a character.
        self._repeated = before.rstrip(_UNFINISHED) if before.endswith(_UNFINISHED) else ""
        self._start = len(before.rstrip(_UNFINISHED))
        self._shown = 0
        self._stream = DecodeStream(ids=self._ids, skip_special_tokens=skip_special_tokens)

    def _decode(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=self._skip)

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        pieces = []
        for token in token_ids:
            self._ids.append(token)
            piece = self._stream.step(self._backend, token)
            if piece:
                pieces.append(piece.removeprefix(self._repeated))
                self._repeated = ""
        text = "".join(pieces)
        self._shown += len(text)
        return text

    def flush(self) -> str:
        """What is left when no more tokens come: a character cut short shows as U+FFFD."""
        tail = self._decode()[self._start + self._shown :]
        self._shown += len(tail)
        return tail
