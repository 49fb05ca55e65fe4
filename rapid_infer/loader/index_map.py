"""Index maps: how a piece of the model lies inside a checkpoint tensor of another layout.

An index map never builds the whole piece: it turns a slice of the piece into slices of the stored tensor, so that a
rank still reads only its share. Maps know nothing of names, files or modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch

T = TypeVar("T")
Shape = tuple[int, ...]
Slices = tuple[slice, ...]
Fetch = Callable[[Slices], torch.Tensor]
"""Reads `stored[slices]`; one slice of step 1 per dimension."""


@runtime_checkable
class IndexMap(Protocol):
    """A piece as a function of a stored tensor."""

    def shape(self, stored: Shape) -> Shape:
        """Shape of the piece that a tensor of shape `stored` yields. ValueError when it cannot yield one."""
        ...

    def read(self, fetch: Fetch, stored: Shape, source: Slices) -> torch.Tensor:
        """`piece[source]`, fetching no more of the stored tensor than that needs; `source` is from `full_slices`."""
        ...


@dataclass(frozen=True)
class Transpose:
    """Swaps the last two dimensions; tensors of fewer dimensions (biases, scalars) stay as they are."""

    def shape(self, stored: Shape) -> Shape:
        return _swap_last_two(stored)

    def read(self, fetch: Fetch, stored: Shape, source: Slices) -> torch.Tensor:
        if len(stored) < 2:
            return fetch(source)
        return fetch(_swap_last_two(source)).transpose(-1, -2)

    def __str__(self) -> str:
        return "transpose"


@dataclass(frozen=True)
class Section:
    """Section `piece` of dimension `dim` cut in proportion to `sizes`; a single value goes to every section whole."""

    sizes: tuple[int, ...]
    piece: int
    dim: int = 0

    def shape(self, stored: Shape) -> Shape:
        start, stop = self._bounds(stored)
        return _replace_item(stored, self.dim, stop - start) if len(stored) > self.dim else stored

    def read(self, fetch: Fetch, stored: Shape, source: Slices) -> torch.Tensor:
        if len(stored) <= self.dim:
            return fetch(source)
        start, _ = self._bounds(stored)
        cut = source[self.dim]
        return fetch(_replace_item(source, self.dim, slice(start + cut.start, start + cut.stop)))

    def _bounds(self, stored: Shape) -> tuple[int, int]:
        if len(stored) <= self.dim or stored[self.dim] == 1:
            return 0, 1
        unit, rest = divmod(stored[self.dim], sum(self.sizes))
        if rest:
            raise ValueError(f"{stored[self.dim]} entries of dimension {self.dim} cannot be cut {self.sizes}")
        before = unit * sum(self.sizes[: self.piece])
        return before, before + unit * self.sizes[self.piece]

    def __str__(self) -> str:
        return f"section {self.piece} of {':'.join(map(str, self.sizes))}, dim {self.dim}"


@dataclass(frozen=True)
class Interleave:
    """Stored rows alternate between `groups` within each unit; the piece has the groups one after the other.

    Row `g * (unit / groups) + i` of a unit of the piece is row `i * groups + g` of that unit as stored. `unit` None
    means the whole dimension. Example: unit 128, groups 2 turns rotary pairs (2i, 2i + 1) into two halves.
    """

    unit: int | None = None
    groups: int = 2
    dim: int = 0

    def shape(self, stored: Shape) -> Shape:
        if len(stored) > self.dim:
            rows, unit = stored[self.dim], self._unit(stored)
            if rows % unit or unit % self.groups:
                raise ValueError(
                    f"{rows} entries of dimension {self.dim} are not units of {unit} in {self.groups} groups"
                )
        return stored

    def read(self, fetch: Fetch, stored: Shape, source: Slices) -> torch.Tensor:
        if len(stored) <= self.dim:
            return fetch(source)
        cut, unit = source[self.dim], self._unit(stored)
        rows = torch.arange(cut.start, cut.stop)
        if not len(rows):
            return fetch(source)
        within = rows % unit
        each = unit // self.groups
        rows = rows - within + (within % each) * self.groups + within // each
        first, last = int(rows.min()), int(rows.max())
        return _select_rows(fetch(_replace_item(source, self.dim, slice(first, last + 1))), self.dim, rows - first)

    def _unit(self, stored: Shape) -> int:
        return self.unit or max(stored[self.dim], 1)

    def __str__(self) -> str:
        return f"interleave {self.groups} groups per {self.unit or 'all'} entries, dim {self.dim}"


@dataclass(frozen=True)
class Chain:
    """`second` applied to what `first` yields."""

    first: IndexMap
    second: IndexMap

    def shape(self, stored: Shape) -> Shape:
        return self.second.shape(self.first.shape(stored))

    def read(self, fetch: Fetch, stored: Shape, source: Slices) -> torch.Tensor:
        def between(cut: Slices) -> torch.Tensor:
            return self.first.read(fetch, stored, cut)

        return self.second.read(between, self.first.shape(stored), source)

    def __str__(self) -> str:
        return f"{self.first}, then {self.second}"


def transpose() -> Transpose:
    """For checkpoints that store a matrix as [in, out]: swaps the last two dimensions, leaves vectors alone."""
    return Transpose()


def interleave(unit: int | None = None, groups: int = 2, dim: int = 0) -> Interleave:
    """For stored rows that alternate between groups (see `Interleave`): rotary pairs, or gate and up row by row."""
    return Interleave(unit, groups, dim)


def chain(first: IndexMap | None, second: IndexMap | None) -> IndexMap | None:
    """Both maps, `first` nearest to the stored tensor; None stands for "as it is"."""
    if first is None or second is None:
        return first or second
    return Chain(first, second)


def full_slices(source: tuple[slice, ...], shape: Shape) -> Slices:
    """One slice with explicit bounds and step 1 per dimension of `shape`. ValueError: too many slices, or a step."""
    if len(source) > len(shape):
        raise ValueError(f"{len(source)} slices for a tensor of shape {list(shape)}")
    bounds = [cut.indices(size) for cut, size in zip(source, shape)]
    if any(step != 1 for _, _, step in bounds):
        raise ValueError(f"slices of a checkpoint tensor must have step 1, got {source}")
    cuts = tuple(slice(start, max(start, stop)) for start, stop, _ in bounds)
    return cuts + tuple(slice(0, size) for size in shape[len(source) :])


def sliced_shape(index: tuple[slice | int, ...], shape: Shape) -> Shape:
    """Shape of `tensor[index]` for a tensor of `shape`. ValueError: more indices than dimensions."""
    if len(index) > len(shape):
        raise ValueError(f"{len(index)} indices for a tensor of shape {list(shape)}")
    cuts = [len(range(*cut.indices(size))) for cut, size in zip(index, shape) if isinstance(cut, slice)]
    return (*cuts, *shape[len(index) :])


def is_scalar(shape: Shape) -> bool:
    """Whether a shape holds one value, however it is written: [], [1], [1, 1]."""
    return math.prod(shape) == 1


def _swap_last_two(items: tuple[T, ...]) -> tuple[T, ...]:
    return items if len(items) < 2 else (*items[:-2], items[-1], items[-2])


def _replace_item(items: tuple[T, ...], position: int, item: T) -> tuple[T, ...]:
    return (*items[:position], item, *items[position + 1 :])


def _select_rows(tensor: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    # One-byte formats have no index_select on the CPU; their bytes have.
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8).index_select(dim, rows).view(tensor.dtype)
    return tensor.index_select(dim, rows)
