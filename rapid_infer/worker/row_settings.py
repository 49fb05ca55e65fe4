"""Settings of rows on the device: the columns of `engine/row_fields.py`, packed so that one gather takes a row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.row_fields import ROW_DTYPE, neutral_settings
from rapid_infer.engine.step_plan import NewRows

_WORDS = ROW_DTYPE.itemsize // 4


class RowSettings:
    """`words` int32 `[rows, words of a row]`; an attribute for each field of ROW_DTYPE is a view `[rows]` of them."""

    __slots__ = ("words",)

    def __init__(self, words: Tensor) -> None:
        self.words = words

    @classmethod
    def neutral(cls, rows: int, device: torch.device) -> RowSettings:
        """Rows that ask for nothing."""
        return cls(torch.from_numpy(_pack(neutral_settings(rows))).view(rows, _WORDS).to(device))

    def __getattr__(self, name: str) -> Tensor:
        if name not in _COLUMNS:
            raise AttributeError(f"rows have no setting {name!r}: expected one of {', '.join(_COLUMNS)}")
        dtype, column = _COLUMNS[name]
        return self.words.view(dtype)[:, column]

    @staticmethod
    def pack_rows(new: NewRows) -> np.ndarray:
        """What new rows bring as words int32 `[new * words]`: one array to stage and one write."""
        return _pack(new.settings)

    def write_rows(self, rows: Tensor, words: Tensor) -> None:
        """Take over what `pack_rows` made, for rows `[n]` int64."""
        self.words.index_copy_(0, rows, words.view(-1, _WORDS))

    def gather_rows(self, rows: Tensor) -> RowSettings:
        """The same settings for some rows."""
        return RowSettings(self.words.index_select(0, rows))


def _pack(settings: np.ndarray) -> np.ndarray:
    return settings.view(np.int32).reshape(-1)


def _columns() -> dict[str, tuple[torch.dtype, int]]:
    """Of each field its dtype and its column in a view of that dtype."""
    found = {}
    for name, (kind, offset, *_) in (ROW_DTYPE.fields or {}).items():
        found[name] = torch.from_numpy(np.empty(0, kind)).dtype, offset // kind.itemsize
    return found


_COLUMNS = _columns()
