"""Loads a checkpoint into a model: plan, check, then copy slice by slice in the order of the files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import nn

from rapid_infer.errors import WeightError
from rapid_infer.loader.computed import KV_SCALE
from rapid_infer.loader.copies import Copy
from rapid_infer.loader.inventory import Inventory, Read
from rapid_infer.loader.plan import BYTES, plan_load
from rapid_infer.loader.progress import Progress, silent
from rapid_infer.loader.weight_map import WeightMap

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What loading did on this rank."""

    bytes_read: int
    seconds: float
    num_tensors: int
    """Checkpoint tensors of which this rank read something."""
    ignored: dict[str, str]
    """Checkpoint tensors that are not wanted, each with the reason."""
    untied: tuple[str, ...] = ()
    """Checkpoint tensors that differ from what the model tied them to, and got a parameter of their own."""


def load_weights(
    model: nn.Module, weight_map: WeightMap, directory: str | Path, *, progress: Progress | None = None
) -> LoadReport:
    """Fills every parameter of `model`, which must not be on the meta device, from the checkpoint in `directory`.

    Reads this rank's slices only, casts while it copies, and ends with `finalize_weights`. WeightError, before any
    weight is read, when the files cannot be read or do not fill the model exactly.
    """
    start = time.perf_counter()
    inventory = Inventory.scan(directory)
    plan = plan_load(model, weight_map, inventory)
    plan.check()
    for name in plan.untied:
        logger.warning(
            "%s ties %s to another tensor, but the files hold both with different values: each is used for its own. "
            "Set tie_word_embeddings to false in %s to silence this",
            *(plan.directory / "config.json", name, plan.directory / "config.json"),
        )
    if scales := [name for name, why in plan.ignored.items() if why == KV_SCALE]:
        logger.info(
            "%d scales, such as %s, are not used: they are for keys and values in FP8 (kv_cache_dtype='fp8')",
            *(len(scales), scales[0]),
        )
    if plan.unscaled:
        logger.warning(
            "the files have no scales for the quantized KV cache of %d layers, such as %s: 1.0 is used, which is less "
            "exact where keys or values are far from 1",
            *(len(plan.unscaled), plan.unscaled[0]),
        )
    done = 0
    bytes_of: dict[str, int] = {}
    with torch.no_grad(), (progress or silent)(plan.bytes_to_read) as advance:
        for file, copies in groupby(plan.copies, key=lambda copy: copy.info.file):
            with inventory.open(file) as read:
                for copy in copies:
                    nbytes = _run_copy(copy, read)
                    bytes_of[copy.info.name] = bytes_of.get(copy.info.name, 0) + nbytes
                    advance(nbytes)
                    done += 1
    assert done == len(plan.copies), f"{done} of {len(plan.copies)} copies ran"
    finalize(model)
    return LoadReport(sum(bytes_of.values()), time.perf_counter() - start, len(bytes_of), plan.ignored, plan.untied)


def finalize(model: nn.Module) -> None:
    """Calls `finalize_weights()` once on every module that has it, parents before their children."""
    with torch.no_grad():
        for module in model.modules():
            last_touch: Callable[[], None] | None = getattr(module, "finalize_weights", None)
            if last_touch is not None:
                last_touch()


def _run_copy(copy: Copy, read: Read) -> int:
    """Performs one copy; the bytes it read."""
    param = copy.placement.param
    assert not param.is_meta, f"the parameter for {copy.info.name} is still on the meta device"
    values, nbytes = copy.read(partial(read, copy.info.name))
    if copy.placement.check is not None and (fault := copy.placement.check(values)):
        raise WeightError(
            f"{copy.info.file}: tensor {copy.info.name}: {fault}; fetch the file again or use another checkpoint"
        )
    if copy.placement.store is not None:
        copy.placement.store(values)
        return nbytes
    region = param.data[copy.placement.target]
    if values.dtype in BYTES:
        values = values.view(param.dtype)
    if values.numel() == 1:
        values = values.reshape(region.shape)
    assert region.shape == values.shape, f"{copy.info.name}: {list(values.shape)} for {list(region.shape)}"
    region.copy_(values)
    return nbytes
