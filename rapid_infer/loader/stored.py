"""Which tensors of a checkpoint fill which module, asked before there is a model: formats are chosen by it."""

from __future__ import annotations

from rapid_infer.loader.headers import TensorInfo
from rapid_infer.loader.inventory import Inventory
from rapid_infer.loader.rules import Ignored
from rapid_infer.loader.weight_map import WeightMap
from rapid_infer.quant.stored import StoredModules, StoredPart


def stored_modules(weight_map: WeightMap, inventory: Inventory | None) -> StoredModules:
    """By headers and `weight_map` alone; without an inventory by the names that the map would take."""
    if inventory is None:
        return StoredModules(sources=weight_map.sources)
    found: dict[str, dict[str, dict[str, TensorInfo]]] = {}
    for info in inventory.tensors.values():
        targets = weight_map.resolve(info.name)
        for target in () if isinstance(targets, Ignored) else targets:
            name = info.name.removesuffix(f".{target.leaf}").removesuffix(f"_{target.leaf}")
            found.setdefault(target.path, {}).setdefault(name, {})[target.leaf] = info
    parts = {
        path: tuple(StoredPart(name, leaves) for name, leaves in by_name.items()) for path, by_name in found.items()
    }
    return StoredModules(parts)
