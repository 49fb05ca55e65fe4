"""What ranks of one group do together. A provider of it moves the bytes; layers know only this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """The ranks of one group, as one of them sees it. Every rank must make the same calls in the same order, with
    tensors of the same shape and dtype.
    """

    @property
    def name(self) -> str:
        """Of the provider: "gloo", "shm", ..."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, added in fp32 in the order of the ranks: the same bits on each. x may be overwritten
        and returned.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """`[ranks, *x.shape]`: x of every rank, in order."""
        ...


@dataclass(frozen=True)
class EmptyComm:
    """Moves nothing, and gives tensors of the right shape that mean nothing: for what is counted, compiled or timed on
    one rank alone.
    """

    size: int
    name: str = "empty"

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).expand(self.size, *x.shape).contiguous()
