"""Bookkeeping of which pieces of which parameters a checkpoint fills, and of the regions that its copies write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from torch import nn

from rapid_infer.layers.parameter import Part, parts_of
from rapid_infer.loader.copies import Copy

Region = tuple[tuple[int, int], ...]
"""First and one past the last index in each dimension of a parameter."""

Slot = int | None
"""Position of an expert in a parameter that holds several on this rank; None: no expert, or all of them."""


@dataclass
class ParameterCoverage:
    """One parameter, under the first name it has in the model, and the pieces seen so far."""

    name: str
    param: nn.Parameter
    parts: tuple[Part, ...]
    filled: dict[tuple[Slot, Part], str] = field(default_factory=dict)
    experts: dict[int, int] = field(default_factory=dict)
    """Global expert number of each slot seen."""

    def add_piece(self, slot: Slot, part: Part, expert: int | None, source: str) -> str | None:
        """Notes that `source` fills a piece, unless another tensor does in whole or in part: then returns its name."""
        rival = next((self.filled[key] for key in self._clashes(slot, part)), None)
        if rival is None:
            self.filled[slot, part] = source
            if slot is not None and expert is not None:
                self.experts[slot] = expert
        return rival

    def _clashes(self, slot: Slot, part: Part) -> Iterator[tuple[Slot, Part]]:
        """Pieces already filled that share values with this one; None stands for all slots or all parts."""
        slots = (*self.experts, None) if slot is None else (slot, None)
        parts = (*self.parts, None) if part is None else (part, None)
        return (key for key in product(slots, parts) if key in self.filled)

    def missing_pieces(self) -> list[tuple[Slot, Part]]:
        """The pieces that nothing fills, in order; all experts of a slot-wise filled parameter are wanted."""
        slots = range(self.param.shape[0]) if self.experts else (None,)
        return [(slot, part) for slot in slots for part in self.parts if not self._is_filled(slot, part)]

    def _is_filled(self, slot: Slot, part: Part) -> bool:
        return next(self._clashes(slot, part), None) is not None

    def describe_pieces(self, pieces: list[tuple[Slot, Part]]) -> str:
        """Pieces in words: "q, v", or "expert 3 (0, 1)"."""
        by_slot: dict[Slot, list[Part]] = {}
        for slot, part in pieces:
            by_slot.setdefault(slot, []).append(part)
        return ", ".join(self._describe_slot(slot, parts) for slot, parts in by_slot.items())

    def _describe_slot(self, slot: Slot, parts: list[Part]) -> str:
        words = ", ".join("the whole" if part is None else str(part) for part in parts)
        if slot is None:
            return words
        shifts = {expert - place for place, expert in self.experts.items()}
        who = f"expert {slot + shifts.pop()}" if len(shifts) == 1 else f"expert slot {slot}"
        return who if parts in ([None], list(self.parts)) else f"{who} ({words})"


def cover_parameters(model: nn.Module) -> dict[int, ParameterCoverage]:
    """All parameters of `model` by identity; a shared one once, under its first name."""
    coverage: dict[int, ParameterCoverage] = {}
    for path, module in model.named_modules():
        for leaf, param in module._parameters.items():
            if param is not None and id(param) not in coverage:
                name = f"{path}.{leaf}" if path else leaf
                coverage[id(param)] = ParameterCoverage(name, param, tuple(parts_of(module, leaf)))
    return coverage


def find_overlaps(copies: Iterable[Copy]) -> Iterator[tuple[Copy, Copy]]:
    """Copies that write what another one writes too, each once, after the one that comes first in the parameter."""
    by_param: dict[int, list[tuple[Region, Copy]]] = {}
    for copy in copies:
        by_param.setdefault(id(copy.placement.param), []).append((written_region(copy), copy))
    for written in by_param.values():
        # A parameter may be written by hundreds of experts: only those that share rows are compared.
        open_regions: list[tuple[Region, Copy]] = []
        for here, copy in sorted(written, key=lambda entry: entry[0]):
            open_regions = [entry for entry in open_regions if not here or entry[0][0][1] > here[0][0]]
            rival = next((other for there, other in open_regions if _share_values(here, there)), None)
            if rival is not None:
                yield rival, copy
            open_regions.append((here, copy))


def written_region(copy: Copy) -> Region:
    """What `copy` writes of its parameter."""
    target, shape = copy.placement.target, copy.placement.param.shape
    bounds: list[tuple[int, int]] = []
    for dim, size in enumerate(shape):
        index = target[dim] if dim < len(target) else slice(None)
        if isinstance(index, slice):
            start, stop, step = index.indices(size)
            assert step == 1, f"{copy.info.name}: a layer's target must have step 1, got {index}"
            bounds.append((start, max(start, stop)))
        else:
            bounds.append((index % size, index % size + 1))
    return tuple(bounds)


def _share_values(one: Region, other: Region) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other))
