"""Collectives by stores into the peers' memory, for what is small; another provider, if there is one, for the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rapid_infer.parallel.comm import Comm, ordered_sum
from rapid_infer.parallel.push import (
    PushBuffers,
    PushRefused,
    push_all_gather,
    push_all_reduce,
    push_all_reduce_add_rms_norm,
)

MAX_BYTES = 2 << 20
"""Of a message that goes in one call."""

FUSED_RANKS = 2
"""With more, a kernel for the sum and one for the norm are faster than one for both: docs/performance/h200.md."""


class PushComm:
    """`larger` takes what does not fit into a call; without it that goes in pieces."""

    name, capturable = "push", True

    def __init__(self, buffers: PushBuffers, larger: Comm | None, entered: Callable[[], object]) -> None:
        self._buffers, self._larger, self._entered = buffers, larger, entered

    @classmethod
    def meet(cls, device: torch.device, larger: Comm | None, entered: Callable[[], object]) -> PushComm:
        """Collective over the default process group. RuntimeError where there is no symmetric memory."""
        return cls(PushBuffers.rendezvous(dist.group.WORLD, MAX_BYTES, device), larger, entered)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._entered()
        x = x.contiguous()
        out = torch.empty_like(x)
        try:
            return push_all_reduce(self._buffers, x, out)
        except PushRefused:
            if self._larger is not None:
                return self._larger.all_reduce(x)
        return ordered_sum(self.all_gather(x), x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        self._entered()
        x = x.contiguous()
        if self._larger is not None and x.nbytes > MAX_BYTES:
            return self._larger.all_gather(x)
        out = torch.empty((self._buffers.world_size, *x.shape), dtype=x.dtype, device=x.device)
        return push_all_gather(self._buffers, x, out)

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        if self._buffers.world_size > FUSED_RANKS:
            return None
        out, added = torch.empty_like(x), torch.empty_like(residual)
        try:
            found = push_all_reduce_add_rms_norm(self._buffers, x, residual, weight, eps, out, added)
        except PushRefused:
            return None
        self._entered()
        return found

    def check(self) -> None:
        if (late := int(self._buffers.error[0])) != 0:
            missing = [rank for rank in range(self._buffers.world_size) if late >> rank & 1]
            raise RuntimeError(f"a collective over push has waited in vain for ranks {missing}")
