"""Which tokens a request may choose: a fixed list, or a grammar that follows what has been generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rapid_infer.errors import RequestError

Bits = NDArray[np.int32]
"""`[ceil(vocab / 32)]`: id i is allowed when bit `i % 32` of word `i // 32` is set, as grammar libraries pack it."""


class TokenMask(Protocol):
    """What limits a request's next token.

    `changes`: the mask depends on the output, so the next token waits until the host has seen the last one; otherwise
    it is asked for once.
    """

    changes: bool

    def bits(self, output_token_ids: Sequence[int]) -> Bits:
        """The mask of the next token. At least one token must be allowed."""
        ...


def pack(token_ids: Sequence[int], vocab_size: int) -> Bits:
    """A mask that allows exactly these ids. RequestError for an id outside the vocabulary."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"allowed token id {token} is outside the vocabulary: expected 0 to {vocab_size - 1}")
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)


class AllowedTokens:
    """The same ids for every token of the request."""

    changes = False

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._bits = pack(token_ids, vocab_size)

    def bits(self, output_token_ids: Sequence[int]) -> Bits:
        return self._bits
