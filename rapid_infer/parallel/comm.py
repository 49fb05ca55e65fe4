"""What ranks of one group do together. A provider of it moves the bytes; layers know only this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Comm(Protocol):
    """The ranks of one group, as one of them sees it. Every rank must make the same calls in the same order, with
    tensors of the same shape and dtype.
    """

    @property
    def name(self) -> str:
        """Of the provider: "gloo", "shm", ..."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can record it."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each: added in fp32 in their order, but by NCCL in an order and a
        precision of its own. x may be overwritten and returned.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """`[ranks, *x.shape]`: x of every rank, in order."""
        ...

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """`fused_add_rms_norm(all_reduce(x), residual, ...)` in one kernel, as the Triton operator rounds; None where
        this provider has none for such tensors, and nothing was done.
        """
        ...

    def check(self) -> None:
        """RuntimeError when a collective of the past has not been what it should; after the device is done with it."""
        ...


def ordered_sum(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """What the ranks gave, added in fp32 in their order and rounded once."""
    first, *others = parts
    total = first.float()
    for other in others:
        total = total + other
    return total.to(dtype)


class PlainComm:
    """What a provider without more than sums and gathers has besides."""

    capturable = True

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        return None

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class EmptyComm(PlainComm):
    """Moves nothing, and gives tensors of the right shape that mean nothing: for what is counted, compiled or timed on
    one rank alone.
    """

    size: int
    name: str = "empty"

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).expand(self.size, *x.shape).contiguous()
