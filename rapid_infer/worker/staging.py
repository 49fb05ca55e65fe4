"""The one copy from host to device that a step makes: all its arrays packed into one pinned buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16


class Staging:
    """Host buffers in turns: one is written again only `slots` steps later, when its copy is long done.

    `slots` must exceed the number of steps in flight. On a CPU the host buffer is the device buffer.
    """

    def __init__(self, device: torch.device, slots: int, capacity: int = 1 << 16) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._host = [self._new(capacity) for _ in range(slots)]
        self._next = 0
        self._on_device = torch.empty(capacity, dtype=torch.uint8, device=device) if self._pinned else None

    def _new(self, capacity: int) -> Tensor:
        return torch.empty(capacity, dtype=torch.uint8, pin_memory=self._pinned)

    def copy_to_device(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Device tensors of the same shapes and dtypes, valid until this slot's next turn, on a GPU in stream order."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        host = self._slot(end)
        view = host.numpy()
        for array, start in zip(arrays, starts):
            view[start : start + array.nbytes] = array.view(np.uint8)
        packed = host
        if self._on_device is not None:
            packed = self._on_device[:end]
            packed.copy_(host[:end], non_blocking=True)
        return [
            packed[start : start + array.nbytes].view(_TORCH[array.dtype.type]) for array, start in zip(arrays, starts)
        ]

    def _slot(self, size: int) -> Tensor:
        self._next = (self._next + 1) % len(self._host)
        if self._host[self._next].numel() < size:
            self._host[self._next] = self._new(2 * size)
        if self._on_device is not None and self._on_device.numel() < size:
            self._on_device = torch.empty(2 * size, dtype=torch.uint8, device=self._device)
        return self._host[self._next]


_TORCH = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}
