"""A sum over ranks that is still to be made, so that whoever takes it may fuse it with what comes next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from rapid_infer.errors import PluginError

if TYPE_CHECKING:
    from rapid_infer.parallel.state import ParallelState


class PartialSum:
    """This rank's share `[tokens, hidden]` of what layer `layer` gives: a norm takes it, and nothing else.

    PluginError, which names the layer, for whatever else is done with it.
    """

    __slots__ = ("layer", "parallel", "value")

    def __init__(self, value: Tensor, parallel: ParallelState, layer: str) -> None:
        self.value, self.parallel, self.layer = value, parallel, layer

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def __len__(self) -> int:
        return len(self.value)

    def reduce(self) -> Tensor:
        """The sum over the ranks, the same bits on each."""
        return self.parallel.all_reduce(self.value)

    def add_rms_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """The sum fused with what a norm does next, as the Triton operator rounds; None where it cannot be."""
        comm = self.parallel.comm
        return None if comm is None else comm.all_reduce_add_rms_norm(self.value, residual, weight, eps)

    def _refuse(self, what: str) -> NoReturn:
        raise PluginError(
            f"{self.layer} was built with defer=True, so with several ranks its result is a sum that is still to be "
            f"made, and {what} cannot take it: give it to RMSNorm, or build the layer without defer"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        found = [item for one in given for item in (one if isinstance(one, (list, tuple)) else [one])]
        next(item for item in found if isinstance(item, cls))._refuse(getattr(func, "__name__", repr(func)))


def _refuse(name: str) -> Any:
    def refuse(self: PartialSum, *args: Any) -> NoReturn:
        self._refuse(name)

    return refuse


_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "rmatmul", "neg", "getitem", "iter")
for _name in _OPERATORS:
    setattr(PartialSum, f"__{_name}__", _refuse(_name))


def reduced(x: Tensor | PartialSum) -> Tensor:
    """x, summed over the ranks where that is still to be done."""
    return x.reduce() if isinstance(x, PartialSum) else x


def share(x: Tensor | PartialSum) -> Tensor:
    """What this rank has of x, for a caller that adds to it before the sum."""
    return x.value if isinstance(x, PartialSum) else x
