"""How a checkpoint tensor finds its place in a module: the contract between layers, which cut, and the loader, which
copies.

A module may implement `Loadable`; any other module's parameters are taken whole by every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from torch import Tensor, nn

Part = str | int | None
"""Which piece of a merged parameter a tensor is: "q", "k", "v", 0, 1, or None for the whole."""


@dataclass(frozen=True)
class Placement:
    """One copy: `param[target] = tensor[source]`, for a checkpoint tensor of exactly `shape`.

    `source` and `target` have one slice per leading dimension; missing trailing dimensions are taken whole. `check`
    says what is wrong with values of the tensor, or None. `store`, if there is one, takes the values instead, and
    writes what it makes of them to `target`.
    """

    param: nn.Parameter
    shape: tuple[int, ...]
    source: tuple[slice, ...] = ()
    target: tuple[slice | int, ...] = ()
    check: Callable[[Tensor], str | None] | None = None
    store: Callable[[Tensor], None] | None = None


class Loadable(Protocol):
    """A module that cuts or merges its parameters."""

    def parts(self, leaf: str) -> tuple[Part, ...]:
        """The pieces that together fill parameter `leaf` ("weight", "bias", ...)."""
        ...

    def placement(self, leaf: str, part: Part, expert: int | None = None) -> Placement | None:
        """Where piece `part` of `leaf` goes on this rank; None when another rank owns it. KeyError: no such piece."""
        ...


class Elsewhere(nn.Module):
    """Stands where another pipeline stage has a module: tensors under its name are that stage's to load and to check.

    It has no parameters and does not run.
    """


def _is_loadable(module: nn.Module) -> TypeGuard[Loadable]:
    # Asked for every tensor of every expert: isinstance of a protocol takes twenty times as long.
    return hasattr(type(module), "placement") and hasattr(type(module), "parts")


def parts_of(module: nn.Module, leaf: str) -> tuple[Part, ...]:
    """The pieces that fill `module.<leaf>`; one whole piece unless the module says otherwise."""
    return module.parts(leaf) if _is_loadable(module) else (None,)


def placement_of(module: nn.Module, leaf: str, part: Part, expert: int | None = None) -> Placement | None:
    """Where a checkpoint tensor goes. KeyError when `module` has no such parameter or piece."""
    if _is_loadable(module):
        return module.placement(leaf, part, expert)
    param = module._parameters.get(leaf)
    if param is None or part is not None or expert is not None:
        raise KeyError(leaf)
    return Placement(param, tuple(param.shape))
