"""Which groups take their blocks from one pool, and how layers are divided into groups so that they can."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rapid_infer.cache.spec import CacheGroup, CacheSpec

MOST_GROUPS = 8
"""In one pool: each has a block table to fill and slots to find in every step."""


@dataclass(frozen=True)
class PoolSpec:
    """`groups`: their numbers. A block is a page of any of them, `layers` high, which the largest group fills."""

    groups: tuple[int, ...]
    spec: CacheSpec
    layers: int

    def page_bytes(self, block_size: int) -> int:
        return self.layers * self.spec.page_bytes(block_size)


def shared_pools(groups: Sequence[CacheGroup]) -> list[PoolSpec]:
    """One pool for all groups of equal storage, in order of their first groups."""
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group.spec.storage, []).append(number)
    return [
        PoolSpec(tuple(numbers), groups[numbers[0]].spec, max(groups[number].layers for number in numbers))
        for numbers in members.values()
    ]


def divide_layers(layers: Mapping[CacheSpec, int]) -> dict[CacheSpec, list[int]]:
    """Sizes of the groups that the layers of each spec form.

    Specs of equal storage are divided into groups of about equal height: then a block that a window gives back serves
    another layer just as well, and a pool need not be split between them beforehand.
    """
    families: dict[Hashable, list[CacheSpec]] = {}
    for spec in layers:
        families.setdefault(spec.storage, []).append(spec)
    sizes: dict[CacheSpec, list[int]] = {}
    for specs in families.values():
        # Whether blocks go back is the same for every block size.
        height = _height([(layers[spec], spec.policy(block_size=1).trims) for spec in specs])
        for spec in specs:
            sizes[spec] = _evenly(layers[spec], -(-layers[spec] // height))
    return {spec: sizes[spec] for spec in layers}


def _height(counts: Sequence[tuple[int, bool]]) -> int:
    """Layers of a group, given those of each spec and whether it trims.

    Padding of what is kept to the end costs most, then that of the others, then the number of groups.
    """

    def cost(height: int) -> tuple[bool, int, int, int]:
        groups = [-(-count // height) for count, _ in counts]
        kept = sum(n for n, (_, trims) in zip(groups, counts) if not trims)
        return len(counts) < sum(groups) > MOST_GROUPS, kept * height, sum(groups) * height, sum(groups)

    return min(range(1, max(count for count, _ in counts) + 1), key=cost)


def _evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]
