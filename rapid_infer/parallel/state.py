"""The parallel layout of one rank. Layers ask it; models do not.

One rank opens no process group, whatever the environment says.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rapid_infer.errors import ConfigError


@dataclass(frozen=True)
class ParallelState:
    """`tp_rank` of `tp_size` ranks that cut each matrix between them."""

    tp_rank: int = 0
    tp_size: int = 1

    def split(self, size: int, what: str) -> int:
        """This rank's share of `size`. ConfigError, with the sizes that work, when it cannot be split evenly."""
        if size % self.tp_size:
            fits = [n for n in range(1, size + 1) if size % n == 0 and n <= 64]
            raise ConfigError(
                f"{what}={size} cannot be split over tensor_parallel_size={self.tp_size}; use one of {fits}"
            )
        return size // self.tp_size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, the same bits on each."""
        if self.tp_size == 1:
            return x
        raise NotImplementedError("collectives over several ranks")
