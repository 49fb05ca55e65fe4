"""Refuses what cannot fit into a device's memory before any of it is allocated, by numbers counted from shapes.

Weights are exact. Cache, tables and step are what they take at the least, so that nothing is refused that would run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rapid_infer.cache.budget import GIB, fit_model_len, plan_blocks
from rapid_infer.cache.spec import blocks_for
from rapid_infer.config import EngineConfig
from rapid_infer.device import host_memory_limit
from rapid_infer.errors import ConfigError
from rapid_infer.layers.embedding import LMHead
from rapid_infer.layers.linear import Linear
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.profiling import traced
from rapid_infer.worker.build import build_model, cache_budget, cache_demand, cache_groups
from rapid_infer.worker.device_rows import DeviceRows


@dataclass(frozen=True)
class Room:
    """Bytes that this process may take of a device, and in words how they come about."""

    limit: int
    words: str

    @classmethod
    def of(cls, config: EngineConfig) -> Room:
        if config.device != "cuda":
            ranks = config.parallel.tensor_parallel_size
            limit = host_memory_limit() // ranks
            words = "" if ranks == 1 else f" for each of {ranks} ranks"
            return cls(limit, f"{size(limit)} of this machine's memory can be had{words}")
        free, total = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        words = f"{size(free)} of the GPU's {size(total)} are free"
        share = config.cache.gpu_memory_utilization
        if config.cache.kv_cache_memory_bytes is not None or share == 1:
            return cls(free, words)
        limit = max(free - int((1 - share) * total), 0)
        return cls(limit, f"{words}, of which gpu_memory_utilization={share:g} allows {size(limit)}")


@dataclass(frozen=True)
class Need:
    """Bytes. `step`: the widest of a step's tensors, for `tokens` tokens."""

    weights: int
    cache: int
    tables: int
    step: int
    tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.tables + self.step

    def words(self, config: EngineConfig) -> str:
        asked = config.cache.kv_cache_memory_bytes is not None
        length = config.model.max_model_len
        least = "one block of tokens" if config.model.max_model_len_is_auto else f"max_model_len={length}"
        return (
            f"{size(self.weights)} for weights in {config.model.dtype}, {size(self.cache)} for the KV cache "
            f"({'kv_cache_memory_bytes' if asked else f'the least, for {least}'}), {size(self.tables)} for tables of "
            f"max_num_seqs={config.scheduler.max_num_seqs} rows and at least {size(self.step)} for a step of "
            f"{self.tokens} tokens: {size(self.total)}"
        )


@traced("worker.check_memory")
def check_memory(cls: Any, checkpoint: Checkpoint, config: EngineConfig) -> None:
    """ConfigError, with the numbers and what to try, when model, cache and largest step cannot fit the device.

    Builds the model on the meta device, which takes no memory.
    """
    # A table of positions would be computed for real, and a GPU's providers are no choice on the meta device.
    pinned = config.op_priority if config.device == "cpu" else ()
    short = replace(config, model=replace(config.model, max_model_len=1), op_priority=pinned)
    built = build_model(cls, checkpoint, short, "meta")
    room = Room.of(config)
    need = memory_need(built.model, built.config.vocab_size, config, room)
    if need.total > room.limit:
        raise ConfigError(
            f"{checkpoint.architecture} does not fit into memory: it needs {need.words(config)}; {room.words}. "
            f"Try {advice(config, need, room)}"
        )
    if config.cache.kv_cache_memory_bytes is not None or config.device != "cuda":
        # Known already, so it is said before the weights are read and not after.
        groups = cache_groups(built.model)
        length = config.model.max_model_len
        plan = plan_blocks(cache_demand(config, groups), cache_budget(config, groups), length)
        fit_model_len(plan, length, shrink=config.model.max_model_len_is_auto)


def memory_need(model: Any, vocab_size: int, config: EngineConfig, room: Room) -> Need:
    """What `model`, on any device, takes at the least when it runs with `config`."""
    length, block = config.model.max_model_len, config.cache.block_size
    groups = cache_groups(model)
    demand = cache_demand(config, groups)
    least = demand.bytes(1 if config.model.max_model_len_is_auto else length, 1)
    asked = config.cache.kv_cache_memory_bytes
    rows = config.scheduler.max_num_seqs
    most = plan_blocks(demand, cache_budget(config, groups, room.limit), length).num_tokens
    tokens = max(min(config.scheduler.max_num_batched_tokens, rows * length, most), 0)
    device_rows = DeviceRows(torch.device("meta"), rows, len(groups), blocks_for(length, block), vocab_size)
    weights = sum(param.nbytes for param in model.parameters())
    if config.device == "cpu":
        weights += sum(module.packed_bytes for module in model.modules() if isinstance(module, LMHead))
    # Scores of all rows are in fp32.
    step = max(tokens * _widest_input(model), min(rows, tokens) * vocab_size * 4)
    return Need(weights, least if asked is None else asked, device_rows.block_tables.nbytes, step, tokens)


def advice(config: EngineConfig, need: Need, room: Room) -> str:
    """What to try, the most telling first."""
    ways = []
    spare = room.limit - need.total + need.cache
    if config.cache.kv_cache_memory_bytes is not None and spare > 0:
        ways.append(f"kv_cache_memory_bytes={spare} or less")
    if config.model.dtype == "float32":
        ways.append("dtype='bfloat16' (half the weights and half the cache)")
    if config.device == "cuda":
        if config.cache.gpu_memory_utilization < 1 and config.cache.kv_cache_memory_bytes is None:
            ways.append("a higher gpu_memory_utilization")
        ways.append("ending other processes on the GPU")
    fixed = config.model.max_model_len_is_auto or config.cache.kv_cache_memory_bytes is not None
    parts = {
        "a lower max_model_len": 0 if fixed else need.cache,
        "a lower max_num_batched_tokens": need.step,
        "a lower max_num_seqs": need.tables,
    }
    # What is a hundredth of the whole or less makes no difference.
    ways += sorted((way for way in parts if parts[way] > need.total // 100), key=lambda way: -parts[way])
    return ", ".join([*ways, "a smaller model, or a device with more memory"])


@contextmanager
def _refused_out_of_memory() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "no memory left"
        raise ConfigError(
            f"out of memory while the engine started ({reason}). Try a lower max_num_batched_tokens, max_num_seqs, "
            "max_model_len or kv_cache_memory_bytes, a smaller dtype, or ending what else uses the device"
        ) from error


refuses_out_of_memory = _refused_out_of_memory()
"""Decorates what starts an engine: running out of memory, for all that was checked, is a ConfigError with advice."""


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU's allocator has no type of its own for it.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _widest_input(model: nn.Module) -> int:
    """Bytes a token takes in the widest input of a linear layer, of which a step holds at least one."""
    linears = (module for module in model.modules() if isinstance(module, Linear))
    widths = (linear.layout.ins.local * next(linear.parameters()).element_size() for linear in linears)
    return max(widths, default=0)


def size(count: int) -> str:
    """Bytes in words: "15.26 GiB"; "0.25 MiB" where GiB would show nothing."""
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.2f} MiB"
