"""Bookkeeping of which pieces of which parameters a checkpoint fills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from torch import nn

from rapid_infer.layers.parameter import Part, parts_of

Slot = int | None
"""Position of an expert in a parameter that holds several on this rank; None: no expert, or all of them."""


@dataclass
class Owned:
    """One parameter, under the first name it has in the model, and the pieces seen so far."""

    name: str
    param: nn.Parameter
    parts: tuple[Part, ...]
    filled: dict[tuple[Slot, Part], str] = field(default_factory=dict)
    experts: dict[int, int] = field(default_factory=dict)
    """Global expert number of each slot seen."""

    def add(self, slot: Slot, part: Part, expert: int | None, source: str) -> str | None:
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

    def lacking(self) -> list[tuple[Slot, Part]]:
        """The pieces that nothing fills, in order; all experts of a slot-wise filled parameter are wanted."""
        slots = range(self.param.shape[0]) if self.experts else (None,)
        return [(slot, part) for slot in slots for part in self.parts if not self._has(slot, part)]

    def _has(self, slot: Slot, part: Part) -> bool:
        return next(self._clashes(slot, part), None) is not None

    def describe(self, pieces: list[tuple[Slot, Part]]) -> str:
        """Pieces in words: "q, v", or "expert 3 (0, 1)"."""
        by_slot: dict[Slot, list[Part]] = {}
        for slot, part in pieces:
            by_slot.setdefault(slot, []).append(part)
        return ", ".join(self._words(slot, parts) for slot, parts in by_slot.items())

    def _words(self, slot: Slot, parts: list[Part]) -> str:
        words = ", ".join("the whole" if part is None else str(part) for part in parts)
        if slot is None:
            return words
        shifts = {expert - place for place, expert in self.experts.items()}
        who = f"expert {slot + shifts.pop()}" if len(shifts) == 1 else f"expert slot {slot}"
        return who if parts in ([None], list(self.parts)) else f"{who} ({words})"


def owned_parameters(model: nn.Module) -> dict[int, Owned]:
    """All parameters of `model` by identity; a shared one once, under its first name."""
    owned: dict[int, Owned] = {}
    for path, module in model.named_modules():
        for leaf, param in module._parameters.items():
            if param is not None and id(param) not in owned:
                name = f"{path}.{leaf}" if path else leaf
                owned[id(param)] = Owned(name, param, tuple(parts_of(module, leaf)))
    return owned
