"""Text of one completion, token by token: a character is shown when all its bytes are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

_TAIL = 8
"""Prompt tokens that the decoder sees: enough for an unfinished character, which has at most four bytes, and for the
word before.
"""

_BYTES = 4

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Stream decoder over a `tokenizers.Tokenizer`. The pieces it returns, with the flush, add up to the whole text.

    The text continues the prompt: a space that belongs between the two is part of it, and a character whose first bytes
    end the
    prompt is part of it once it is complete.
    """

    def __init__(self, backend: Any, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._unshown: list[int] = []
        self._repeated = ""
        context, rest = self._split(list(prompt_token_ids[-_TAIL:]))
        self._stream = self._stream_after(context)
        self.add(rest)
        self._of_prompt = len(self._unshown)
        # A token may hold the end of one character and the beginning of the next.
        self._repeated = self._decode(self._unshown).rstrip(_UNFINISHED)

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

    def _stream_after(self, token_ids: list[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=token_ids, skip_special_tokens=self._skip)

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        return "".join(map(self._step, token_ids))

    def _step(self, token: int) -> str:
        self._unshown.append(token)
        try:
            piece = self._stream.step(self._backend, token)
        except Exception:
            # The token changed what had been shown: a byte that fits no character spoils its whole run of byte tokens.
            # What was shown stays, and the text goes on with what came after it.
            self._stream = self._stream_after(self._unshown)
            piece = self._decode(self._unshown)
        if piece:
            piece = piece.removeprefix(self._repeated)
            self._unshown, self._of_prompt, self._repeated = [], 0, ""
        return piece or ""

    def flush(self) -> str:
        """What is left when no more tokens come: a character cut short shows as U+FFFD."""
        tail = self._decode(self._unshown) if len(self._unshown) > self._of_prompt else ""
        self._unshown = []
        return tail.removeprefix(self._repeated)
