"""From logits to tokens, on the device, in fp32, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rapid_infer import ops
from rapid_infer.engine.step_plan import NewRows, SamplingFeatures

_WORDS = 12


class _Column:
    """One setting: a view into the words, to read and to write."""

    def __init__(self, dtype: torch.dtype, word: int) -> None:
        self.dtype, self.words = dtype, dtype.itemsize // 4
        self.word = word

    def __get__(self, state: SamplingState, owner: type) -> Tensor:
        return state.words.view(self.dtype)[:, self.word // self.words]


class SamplingState:
    """Per-row settings, all `[rows]`: views of `words` int32 `[rows, 12]`, so that some rows are taken by one gather.

    temperature 0 is greedy, top_k 0 off. Below a total length of `min_length` no stop token may be chosen.
    """

    __slots__ = ("words",)

    seed = _Column(torch.int64, 0)
    min_length = _Column(torch.int32, 2)
    top_k = _Column(torch.int32, 3)
    sample_index = _Column(torch.int32, 4)
    temperature = _Column(torch.float32, 5)
    top_p = _Column(torch.float32, 6)
    min_p = _Column(torch.float32, 7)
    repetition_penalty = _Column(torch.float32, 8)
    presence_penalty = _Column(torch.float32, 9)
    frequency_penalty = _Column(torch.float32, 10)

    def __init__(self, words: Tensor) -> None:
        self.words = words

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> SamplingState:
        """Rows that ask for nothing."""
        state = cls(torch.zeros(rows, _WORDS, dtype=torch.int32, device=device))
        state.top_p.fill_(1.0)
        state.repetition_penalty.fill_(1.0)
        return state

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(name for name, value in vars(cls).items() if isinstance(value, _Column))

    @classmethod
    def pack(cls, new: NewRows) -> np.ndarray:
        """What new rows bring as words int32 `[new * 12]`: one array to stage and one write, where fields are ten."""
        words = np.zeros((len(new.rows), _WORDS), np.int32)
        for name in cls.names():
            column: _Column = vars(cls)[name]
            values = np.ascontiguousarray(getattr(new, name)).view(np.int32).reshape(len(words), column.words)
            words[:, column.word : column.word + column.words] = values
        return words.ravel()

    def put(self, rows: Tensor, words: Tensor) -> None:
        """Take over what `pack` made, for rows `[n]` int64."""
        self.words.index_copy_(0, rows, words.view(-1, _WORDS))

    def take(self, rows: Tensor) -> SamplingState:
        """The same settings for some rows."""
        return SamplingState(self.words.index_select(0, rows))


class SamplingOps(NamedTuple):
    """The operators of `sample`, references or bound providers."""

    truncate_logits: Callable[..., Tensor] = ops.truncate_logits
    gumbel_argmax: Callable[..., tuple[Tensor, Tensor]] = ops.gumbel_argmax

    @classmethod
    def bind(cls, resolver: ops.OpResolver) -> SamplingOps:
        return cls(*(resolver.bind(name, torch.float32) for name in cls._fields))


REFERENCE = SamplingOps()


def sample(
    logits: Tensor,
    state: SamplingState,
    position: Tensor,
    features: SamplingFeatures,
    with_ops: SamplingOps = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """One token per row.

    logits fp32 `[rows, vocab]`, `state` and `position` (index of the new token) of the same rows; returns (token int64
    `[rows]`, failed bool `[rows]`). A failed row had NaN, or no finite maximum; its token is 0, so that it can be
    looked up safely. Greedy rows get the plain argmax, whatever their neighbours ask for.
    """
    if not features.random:
        best, token = logits.max(dim=-1)
        failed = ~torch.isfinite(best)
        return token.where(~failed, 0), failed
    temperature = state.temperature
    if features.truncated or features.min_p:
        logits = logits / temperature.where(temperature > 0, 1.0).unsqueeze(1)
        # What is left for the draw is to tell greedy rows from others.
        temperature = temperature.sign()
        top_k, top_p = (state.top_k, state.top_p) if features.truncated else (None, None)
        logits = with_ops.truncate_logits(logits, top_k, top_p, state.min_p if features.min_p else None)
    return with_ops.gumbel_argmax(logits, temperature, state.seed, state.sample_index, position)
