"""What a request may ask for. Names and meanings follow vLLM's `SamplingParams`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from rapid_infer.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    temperature      0 is greedy; otherwise logits are divided by it. Default 1.0.
    top_k            keep the k most likely tokens; 0 or -1 keeps all. Default 0.
    top_p            keep the smallest set of tokens whose probability reaches this, in (0, 1]. Default 1.0.
    seed             same seed, same tokens. None: the engine's seed plus the request's arrival number.
    n                how many completions of the one prompt; they share its cache blocks. Default 1.
    max_tokens       tokens to generate at most; None means up to the model's length. Default 16, as in vLLM.
    stop_token_ids   ids that end the request besides the model's own stop tokens.
    ignore_eos       go on past the model's own stop tokens (`stop_token_ids` still stop).

    Raises RequestError for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = field(default=())
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check(_is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number >= 0")
        _check(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for off")
        _check(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _check(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed",
            self.seed,
            "a 64-bit integer or None",
        )
        _check(_is_int(self.n) and self.n >= 1, "n", self.n, "an integer >= 1")
        _check(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "an integer >= 1 or None",
        )
        _check(
            all(_is_int(i) and i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "a list of token ids >= 0",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from untyped keys; an unknown key is a RequestError that names near matches."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                near = get_close_matches(key, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise RequestError(f"unknown sampling parameter {key!r}{hint} Known: {', '.join(names)}")
        return cls(**values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise RequestError(f"{name} must be {expected}, got {got!r}")
