"""The parallel layout of one rank. Layers ask it; models do not.

One rank opens no process group, whatever the environment says.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from rapid_infer.errors import ConfigError
from rapid_infer.parallel.comm import Comm, EmptyComm
from rapid_infer.parallel.partial_sum import PartialSum

_NO_ID = 2**31 - 1


@dataclass(frozen=True)
class ParallelState:
    """`tp_rank` of `tp_size` ranks that cut each matrix between them, in pipeline stage `pp_rank` of `pp_size`, which
    cut the model's layers between them.

    Experts are shared out over `ep_size` of those ranks, which divides `tp_size`: neighbours, `tp_size / ep_size` of
    them, hold the same experts and cut their matrices between them. `comm`: what the tp ranks do together; without it a
    state says where things lie and moves nothing. `dp_size`, `pcp_size` and `dcp_size` (replicas, and ranks that share
    a context in prefill and in decode) are 1 in this version.
    """

    tp_rank: int = 0
    tp_size: int = 1
    _: KW_ONLY
    ep_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    comm: Comm | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self.tp_size, self.ep_size)

    @property
    def ep_rank(self) -> int:
        """Which of the `ep_size` shares of the experts this rank has."""
        return self.tp_rank // self.expert_tp_size

    @property
    def expert_tp_size(self) -> int:
        """Ranks that hold the same experts and cut their matrices between them."""
        return self.tp_size // self.ep_size

    @property
    def expert_tp_rank(self) -> int:
        return self.tp_rank % self.expert_tp_size

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
        return split(size, self.tp_size, what, "tensor_parallel_size")

    def expert_map(self, num_experts: int) -> tuple[int, ...]:
        """Where this rank keeps each expert, -1 for those of other ranks. The first ranks have one more where the
        experts cannot be shared out evenly.

        ConfigError when a rank would have none.
        """
        if num_experts < self.ep_size:
            raise ConfigError(
                f"num_experts={num_experts} leaves a rank without experts with expert_parallel_size={self.ep_size}; "
                f"use {num_experts} or fewer"
            )
        share, more = divmod(num_experts, self.ep_size)
        start = self.ep_rank * share + min(self.ep_rank, more)
        mine = range(start, start + share + (self.ep_rank < more))
        return tuple(expert - start if expert in mine else -1 for expert in range(num_experts))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, the same bits on each."""
        return x if self.tp_size == 1 else self._comm.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """`[ranks, *x.shape]`: x of every tensor-parallel rank."""
        return x.unsqueeze(0) if self.tp_size == 1 else self._comm.all_gather(x)

    def finish_sum(self, x: Tensor, defer: bool, layer: str) -> Tensor | PartialSum:
        """The sum of every rank's x, or what is to become of it (`defer`); `layer` is who gives it."""
        if self.tp_size == 1:
            return x
        return PartialSum(x, self, layer) if defer else self.all_reduce(x)

    def best(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The highest of all ranks' values and its id, the lowest one among equals: values fp32 and ids int64 `[n]`.

        Where a rank has NaN or infinity the value is NaN.
        """
        if self.tp_size == 1:
            return values, ids
        packed = torch.stack((values.view(torch.int32), ids.to(torch.int32)), dim=1)
        gathered = self.all_gather(packed)
        every, owners = gathered[..., 0].contiguous().view(torch.float32), gathered[..., 1]
        value = every.amax(dim=0)
        best = torch.where(every == value, owners, _NO_ID).amin(dim=0)
        broken = ~torch.isfinite(every).all(dim=0)
        return value.masked_fill(broken, torch.nan), best.masked_fill(broken, 0).long()

    @property
    def _comm(self) -> Comm:
        return EmptyComm(self.tp_size) if self.comm is None else self.comm


def check_sizes(tp_size: int, ep_size: int) -> None:
    """ConfigError for a layout that there cannot be."""
    if ep_size < 1 or tp_size % ep_size:
        fits = [n for n in range(1, tp_size + 1) if tp_size % n == 0]
        raise ConfigError(
            f"expert_parallel_size={ep_size} does not divide tensor_parallel_size={tp_size}; use one of {fits}"
        )


def split(size: int, ranks: int, what: str, option: str) -> int:
    """`size / ranks`. ConfigError, with the values of `option` that work, when that is not whole."""
    if size % ranks:
        fits = [n for n in range(1, size + 1) if size % n == 0 and n <= 64]
        raise ConfigError(f"{what}={size} cannot be split over {option}={ranks}; use one of {fits}")
    return size // ranks
