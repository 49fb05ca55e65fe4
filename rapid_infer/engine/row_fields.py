"""The settings of a row, each defined once: where it comes from, how the device keeps it, what it asks of a step.

A `RowField` is a number of each row, from the request to the device's table: what new rows bring and the columns of the
table derive from `ROW_FIELDS`. A flag of `SamplingFeatures` says what a step must do, and which requests ask for it. So
a new setting is defined in `SamplingParams`, here, and where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rapid_infer.engine.request import Request

_FACTOR_MAX = 1e20
"""Factors beyond this, and below its inverse, act as this: float32 logits times them stay finite."""

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowField:
    """`of` gives the number of a request; `neutral` is that of a row that asks for nothing."""

    name: str
    dtype: type[np.number[Any]]
    of: Callable[[Request], float]
    neutral: float = 0


def _bounded(name: str, low: float = -_FACTOR_MAX) -> Callable[[Request], float]:
    return lambda request: min(max(getattr(request.params, name), low), _FACTOR_MAX)


ROW_FIELDS = (
    RowField("seed", np.int64, lambda request: request.seed),
    # Total length below which no stop token may be chosen.
    RowField("min_length", np.int32, lambda request: min(request.min_length, request.limit)),
    # 0 is off.
    RowField("top_k", np.int32, lambda request: min(max(request.params.top_k, 0), _INT_MAX)),
    RowField("sample_index", np.int32, lambda request: request.sample_index),
    # 0 is greedy.
    RowField("temperature", np.float32, lambda r: 0.0 if r.params.greedy else min(r.params.temperature, _FACTOR_MAX)),
    RowField("top_p", np.float32, _bounded("top_p"), neutral=1),
    RowField("min_p", np.float32, _bounded("min_p")),
    RowField("repetition_penalty", np.float32, _bounded("repetition_penalty", low=1 / _FACTOR_MAX), neutral=1),
    RowField("presence_penalty", np.float32, _bounded("presence_penalty")),
    RowField("frequency_penalty", np.float32, _bounded("frequency_penalty")),
)

_COLUMNS: list[tuple[str, Any]] = [(one.name, one.dtype) for one in ROW_FIELDS]
ROW_DTYPE = np.dtype(_COLUMNS, align=True)
"""One row's settings."""


def settings_of(requests: Sequence[Request]) -> NDArray[np.void]:
    """`[n]` of ROW_DTYPE."""
    made = np.zeros(len(requests), ROW_DTYPE)
    for one in ROW_FIELDS:
        made[one.name] = [one.of(request) for request in requests]
    return made


def neutral_settings(rows: int) -> NDArray[np.void]:
    """`[rows]` of ROW_DTYPE that ask for nothing."""
    made = np.zeros(rows, ROW_DTYPE)
    for one in ROW_FIELDS:
        made[one.name] = one.neutral
    return made


def _asked(by: Callable[[Request], bool]) -> Any:
    return field(default=False, metadata={"by": by})


def _truncates(request: Request) -> bool:
    return not request.params.greedy and (request.params.top_k > 0 or request.params.top_p < 1)


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """What choosing tokens must do for some row of the step; with nothing set it is an argmax.

    logprobs is how many alternatives to report, None for no log-probabilities at all. `processed`: whether logits are
    changed before temperature and truncation.
    """

    random: bool = _asked(lambda request: not request.params.greedy)
    truncated: bool = _asked(_truncates)
    min_p: bool = _asked(lambda request: not request.params.greedy and request.params.min_p > 0)
    penalties: bool = _asked(lambda request: request.params.penalized)
    bias: bool = _asked(lambda request: bool(request.params.logit_bias))
    min_tokens: bool = _asked(lambda request: request.params.min_tokens > 0)
    masks: bool = _asked(lambda request: request.mask is not None)
    logprobs: int | None = None
    processed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "processed", self.penalties or self.bias or self.min_tokens or self.masks)

    @property
    def only_random(self) -> bool:
        """Whether a temperature is all that changes the choice, and nothing else is asked for."""
        return self.random and not (self.truncated or self.min_p or self.processed or self.logprobs is not None)

    @classmethod
    def of_bits(cls, bits: int, logprobs: int) -> SamplingFeatures:
        """What `feature_bits` of some rows, or-ed, come to; `logprobs` below 0: none."""
        asked = {name: True for n, (name, _) in enumerate(_FLAGS) if bits >> n & 1}
        return cls(**asked, logprobs=None if logprobs < 0 else logprobs)


_FLAGS = [(one.name, one.metadata["by"]) for one in fields(SamplingFeatures) if "by" in one.metadata]


def feature_bits(request: Request) -> int:
    """What a request asks for, a bit per flag of `SamplingFeatures`."""
    return sum(1 << n for n, (_, by) in enumerate(_FLAGS) if by(request))
