"""Tied parameters: which they are in a model, and whether a checkpoint that holds both means the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn

from rapid_infer.loader.copies import Copy
from rapid_infer.loader.index_map import Slices
from rapid_infer.loader.inventory import Inventory, Read
from rapid_infer.loader.rules import Tie

CHUNK_BYTES = 1 << 26


def tied_names(modules: Mapping[str, nn.Module], ties: Iterable[Tie]) -> frozenset[str]:
    """Parameters of tie sources that are the very Parameter of the tie's target."""
    names = set()
    for rule in ties:
        source, target = modules.get(rule.source), modules.get(rule.target)
        if source is not None and target is not None:
            shared = {id(param) for param in target._parameters.values() if param is not None}
            names |= {f"{rule.source}.{leaf}" for leaf, param in source._parameters.items() if id(param) in shared}
    return frozenset(names)


def give_own_parameter(module: nn.Module, leaf: str) -> nn.Parameter:
    """Give `module` an uninitialised parameter of its own in place of the one it shares."""
    param = nn.Parameter(torch.empty_like(module.get_parameter(leaf)), requires_grad=False)
    setattr(module, leaf, param)
    return param


def same_values(one: Copy, other: Copy, inventory: Inventory) -> bool:
    """Whether both fill one region with the same values, in its dtype.

    Compares all of the two tensors, not this rank's share, so that every rank decides alike; stops where they differ.
    """
    here, there = one.placement, other.placement
    if here.param is not there.param or here.target != there.target or one.shape != other.shape:
        return False
    rows = one.shape[0] if one.shape else 1
    step = max(CHUNK_BYTES * rows // max(one.info.nbytes, 1), 1)
    cuts: list[Slices] = [(slice(row, row + step),) for row in range(0, rows, step)] if one.shape else [()]
    with inventory.open(one.info.file) as first, inventory.open(other.info.file) as second:
        return all(torch.equal(_values(one, first, cut), _values(other, second, cut)) for cut in cuts)


def _values(copy: Copy, read: Read, cut: Slices) -> torch.Tensor:
    return copy.cut(partial(read, copy.info.name), cut).to(copy.placement.param.dtype)
