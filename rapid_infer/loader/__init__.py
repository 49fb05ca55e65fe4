"""Weights: the remap table, strict accounting, streaming, and dummy weights.

How a tensor is cut belongs to the layer that owns the parameter (`rapid_infer.layers.parameter`); how it is named in a
checkpoint belongs to a model's `WeightMap`; this package brings both together.
"""

from rapid_infer.loader.dummy import load_dummy
from rapid_infer.loader.index_map import IndexMap
from rapid_infer.loader.inventory import Inventory, TensorInfo
from rapid_infer.loader.load import LoadReport, finalize, load_weights
from rapid_infer.loader.plan import LoadPlan, plan_load
from rapid_infer.loader.progress import Progress, terminal_bar
from rapid_infer.loader.weight_map import (
    Ignored,
    Target,
    WeightMap,
    experts,
    ignore,
    interleave,
    rename,
    split,
    stack,
    tie,
    transpose,
)

__all__ = [
    "Ignored",
    "IndexMap",
    "Inventory",
    "LoadPlan",
    "LoadReport",
    "Progress",
    "Target",
    "TensorInfo",
    "WeightMap",
    "experts",
    "finalize",
    "ignore",
    "interleave",
    "load_dummy",
    "load_weights",
    "plan_load",
    "rename",
    "split",
    "stack",
    "terminal_bar",
    "tie",
    "transpose",
]
