"""Text of one completion, token by token: a character is shown when all its bytes are there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Detokenizer:
    """Stream decoder over a `tokenizers.Tokenizer`. The pieces it returns, with the flush, add up to the whole text."""

    def __init__(self, backend: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._shown = 0

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        pieces = []
        for token in token_ids:
            self._ids.append(token)
            piece = self._stream.step(self._backend, token)
            if piece:
                pieces.append(piece)
        text = "".join(pieces)
        self._shown += len(text)
        return text

    def flush(self) -> str:
        """What is left when no more tokens come: a character cut short shows as U+FFFD."""
        tail = self._backend.decode(self._ids, skip_special_tokens=True)[self._shown :]
        self._shown += len(tail)
        return tail
