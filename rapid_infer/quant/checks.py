"""Which stored values no weight can have. Each gives what is wrong with some values of a checkpoint, or None."""

from __future__ import annotations

import torch
from torch import Tensor

BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)


def scales(values: Tensor) -> str | None:
    """Finite and not negative; exponents in bytes (e8m0) not 255. A zero is looked at together with its weights."""
    if values.dtype in BYTES:
        return _first(values.view(torch.uint8) == 255, values, "e8m0 byte 255, which is no number")
    wide = values.float()
    return _first(~(wide.isfinite() & (wide >= 0)), wide, "a scale must be finite and not negative")


def positive(values: Tensor) -> str | None:
    """Scales that a whole matrix or its inputs have: finite and above zero."""
    wide = values.float()
    return _first(~(wide.isfinite() & (wide > 0)), wide, "this scale must be finite and above zero")


def _first(bad: Tensor, values: Tensor, why: str) -> str | None:
    if not bad.any():
        return None
    index = bad.nonzero()[0].tolist()
    value = values.view(torch.uint8) if values.dtype in BYTES else values
    return f"got {value[tuple(index)].item():g} at {index}: {why}"
