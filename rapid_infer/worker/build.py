"""From a checkpoint to a model that is ready to run: build on the device, load, allocate and bind the caches."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from rapid_infer.cache.budget import GIB, CacheDemand, CachePlan, fit_model_len, plan_blocks
from rapid_infer.cache.pools import divide_layers, shared_pools
from rapid_infer.cache.spec import CacheGroup, CacheSpec
from rapid_infer.config import EngineConfig
from rapid_infer.device import available_host_memory, gpu_info
from rapid_infer.errors import ConfigError, PluginError, WeightError
from rapid_infer.layers.attention import CachedModule
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.matrix import MatrixModule
from rapid_infer.loader.dummy import load_dummy
from rapid_infer.loader.inventory import Inventory
from rapid_infer.loader.load import LoadReport, finalize, load_weights
from rapid_infer.loader.progress import Progress, terminal_bar
from rapid_infer.loader.stored import stored_modules
from rapid_infer.loader.weight_map import WeightMap
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.ops.registry import OpResolver
from rapid_infer.parallel import ParallelState
from rapid_infer.profiling import traced
from rapid_infer.quant import OnlineScheme, PlainScheme, QuantScheme, select_scheme
from rapid_infer.worker.contract import check_model
from rapid_infer.worker.memory import MORE_ROOM, MemoryProfile

logger = logging.getLogger(__name__)


@dataclass
class BuiltModel:
    """`report` is None for dummy weights."""

    model: Any
    config: Any
    ops: OpResolver
    report: LoadReport | None = None


@traced("worker.build_model")
def build_model(
    cls: Any,
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: torch.device | str,
    model_config: Any = None,
    parallel: ParallelState | None = None,
) -> BuiltModel:
    """The model with uninitialised parameters of the right dtype. `device` "meta" builds it without memory.

    `model_config`: what `read_config` gives, if that is known. `parallel`: this rank's place; else the first
    rank's, for what is counted and not run.
    """
    device = torch.device(device)
    if model_config is None:
        model_config = cls.read_config(checkpoint.hf_config)
    on_cpu = device.type == "meta" and gpu_info(device) is None
    ops = OpResolver(
        "cpu" if on_cpu else device, dict(config.op_priority), cuda_graphs=config.cuda_graphs and not on_cpu
    )
    sizes = config.parallel
    ctx = BuildContext(
        parallel=parallel or ParallelState(0, sizes.tensor_parallel_size, ep_size=sizes.expert_parallel_size),
        dtype=getattr(torch, config.model.dtype),
        ops=ops,
        max_positions=config.model.max_model_len,
        block_size=config.cache.block_size,
        kv_cache_dtype=config.cache.kv_cache_dtype,
    )
    ctx = replace(ctx, quant=_scheme(cls, checkpoint, config, model_config, ctx))
    with torch.device(device), torch.no_grad():
        model = cls(model_config, ctx)
    check_model(model, model_config, checkpoint.architecture)
    _check_names(model)
    _shorten_lookups(model)
    return BuiltModel(model.eval(), model_config, ops)


def _scheme(
    cls: Any, checkpoint: Checkpoint, config: EngineConfig, model_config: Any, ctx: BuildContext
) -> QuantScheme:
    """How each module is stored, by what the config says and what the files have. ConfigError, WeightError."""
    declared, wanted = checkpoint.quantization_config, config.model.quantization
    if wanted is not None:
        if declared:
            raise ConfigError(
                f"quantization={wanted!r} is for 16-bit checkpoints, and {checkpoint.path} is quantized already "
                f"(quant_method={declared['quant_method']!r}): leave quantization out"
            )
        return OnlineScheme(wanted)
    if not declared:
        return PlainScheme()
    weight_map = inspect.getattr_static(cls, "weight_map")
    if not isinstance(weight_map, WeightMap):
        # It follows from the instance.
        with torch.device("meta"), torch.no_grad():
            weight_map = cls(model_config, ctx).weight_map
    inventory = None
    if config.model.load_format != "dummy":
        # What is wrong with the files is for those to say who read them; some only count.
        with suppress(WeightError):
            inventory = Inventory.scan(checkpoint.path)
    return select_scheme(declared, stored_modules(weight_map, inventory))


def _check_names(model: nn.Module) -> None:
    """Quantization and errors go by the name in the context, so it must be where the module stands."""
    for name, module in model.named_modules():
        if isinstance(module, MatrixModule) and module.ctx_name != name:
            raise PluginError(
                f"{type(model).__name__}: the layer at {name!r} was built with the context of {module.ctx_name!r}; "
                f"pass ctx.sub(...) with the attribute's own name"
            )


def _shorten_lookups(model: nn.Module) -> None:
    """Put submodules and parameters where Python looks first: `nn.Module.__getattr__` comes last and costs far more.

    Assigning one later still works: `nn.Module.__setattr__` removes the shortcut.
    """
    for module in model.modules():
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)


@traced("worker.load_weights")
def load(built: BuiltModel, checkpoint: Checkpoint, config: EngineConfig, progress: Progress = terminal_bar) -> None:
    """Fill the parameters. WeightError when the checkpoint does not fill them exactly."""
    if config.model.load_format == "dummy":
        load_dummy(built.model)
        finalize(built.model)
        return
    built.report = load_weights(built.model, built.model.weight_map, checkpoint.path, progress=progress)


def cached_modules(model: nn.Module) -> dict[CacheSpec, list[CachedModule]]:
    """Modules with a cache, by spec, in the model's order."""
    groups: dict[CacheSpec, list[CachedModule]] = {}
    for module in model.modules():
        if isinstance(module, CachedModule):
            groups.setdefault(module.cache_spec, []).append(module)
    return groups


def grouped_modules(model: nn.Module) -> list[tuple[CacheGroup, list[CachedModule]]]:
    """The cache groups and their modules: consecutive ones of equal spec, all of them wherever that wastes nothing."""
    by_spec = cached_modules(model)
    sizes = divide_layers({spec: len(modules) for spec, modules in by_spec.items()})
    groups = []
    for spec, modules in by_spec.items():
        rest = iter(modules)
        groups += [(CacheGroup(spec, n), list(islice(rest, n))) for n in sizes[spec]]
    return groups


def cache_groups(model: nn.Module) -> list[CacheGroup]:
    return [group for group, _ in grouped_modules(model)]


def cache_demand(config: EngineConfig, groups: Sequence[CacheGroup]) -> CacheDemand:
    """What this many rows, and steps of this many tokens, ask of the caches."""
    scheduler = config.scheduler
    return CacheDemand(groups, config.cache.block_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)


def cache_budget(config: EngineConfig, groups: Sequence[CacheGroup], spare: int | None = None) -> int:
    """Bytes for the caches: what the user said, else what the device can spare, never more than all rows could use.

    `spare`: what a GPU was measured to have left.
    """
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes
    # Past prompts are worth room too, also where few requests run at once.
    sequences = max(config.scheduler.max_num_seqs, 64)
    useful = cache_demand(config, groups).bytes(config.model.max_model_len, sequences)
    if spare is None:
        # The ranks of a machine share its memory.
        spare = min(4 * GIB, available_host_memory() // 4) // config.parallel.tensor_parallel_size
    return max(min(useful, spare), 0)


def plan_cache(
    config: EngineConfig, groups: Sequence[CacheGroup], memory: MemoryProfile | None = None
) -> tuple[CachePlan, int]:
    """(plan, max_model_len); `memory` is what a GPU was measured to take.

    ConfigError, with the arithmetic, when the cache or one request of the wanted length cannot fit.
    """
    if memory is not None:
        memory.check(config.cache.kv_cache_memory_bytes)
    spare = None if memory is None else memory.cache
    budget = cache_budget(config, groups, spare)
    plan = plan_blocks(cache_demand(config, groups), budget, config.model.max_model_len)
    try:
        length = fit_model_len(plan, config.model.max_model_len, shrink=config.model.max_model_len_is_auto)
    except ConfigError as error:
        if memory is None:
            raise
        raise ConfigError(f"{error}. {memory}. {MORE_ROOM}") from None
    logger.info("%s", plan)
    if length < config.model.max_model_len:
        logger.warning(
            "max_model_len lowered from %d to %d, which is what the cache holds", config.model.max_model_len, length
        )
    return plan, length


@traced("worker.allocate_caches")
def allocate_caches(
    model: nn.Module, num_blocks: int | Sequence[int], block_size: int, device: torch.device | str
) -> None:
    """One tensor per pool, each layer bound to its slice. `num_blocks`: of every pool, or of each.

    Not zeroed: nothing reads slots that its row has not written.
    """
    groups = grouped_modules(model)
    pools = shared_pools([group for group, _ in groups])
    counts = [num_blocks] * len(pools) if isinstance(num_blocks, int) else num_blocks
    for pool, blocks in zip(pools, counts, strict=True):
        shape = pool.spec.layout(pool.layers, blocks, block_size)
        cache = torch.empty(shape, dtype=getattr(torch, pool.spec.element), device=device)
        for number in pool.groups:
            for layer, module in enumerate(groups[number][1]):
                module.bind_cache(number, cache[layer])
