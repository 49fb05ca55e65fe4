"""The parallel layout of one rank. Layers ask it; models do not.

One rank opens no process group, whatever the environment says.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from rapid_infer.errors import ConfigError


@dataclass(frozen=True)
class ParallelState:
    """`tp_rank` of `tp_size` ranks that cut each matrix between them, in pipeline stage `pp_rank` of `pp_size`, which
    cut the model's layers between them.
    """

    tp_rank: int = 0
    tp_size: int = 1
    _: KW_ONLY
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def stage_layers(self, n: int) -> range:
        """The numbers of this stage's layers among n; the first stages have one more where they cannot all be equal.

        ConfigError when there are fewer layers than stages.
        """
        if n < self.pp_size:
            raise ConfigError(
                f"num_hidden_layers={n} leaves a stage of pipeline_parallel_size={self.pp_size} empty; use {n} or fewer"
            )
        share, more = divmod(n, self.pp_size)
        start = self.pp_rank * share + min(self.pp_rank, more)
        return range(start, start + share + (self.pp_rank < more))

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
