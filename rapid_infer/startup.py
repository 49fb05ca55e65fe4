"""From a model's name to an engine that runs it: the one factory for all that load a model or describe one."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rapid_infer.config import CheckpointInfo, EngineArgs, EngineConfig
from rapid_infer.device import GpuInfo, gpu_info, probe
from rapid_infer.engine.core import EngineCore
from rapid_infer.engine.executor import Executor
from rapid_infer.errors import ConfigError
from rapid_infer.frontend import EngineInfo
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.ops.precompile.compiler import KernelCompiler, terminal_count
from rapid_infer.params import defaults_of
from rapid_infer.profiling import span, traced
from rapid_infer.registry import Entry, ModelRegistry
from rapid_infer.text import Tokenizer

logger = logging.getLogger(__name__)

DRY_RUN = "rapid_infer.worker.dry_run:dry_run"


@dataclass(frozen=True, slots=True)
class ConfiguredModel:
    """A plugin's model class, what its `read_config` returned, and the engine's configuration, every "auto" decided."""

    cls: Any
    model_config: Any
    config: EngineConfig

    @property
    def gpu(self) -> GpuInfo | None:
        import torch

        return gpu_info(torch.device(self.config.device))


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A loaded model in this process with the engine that drives it; `info` is what a front must know of it."""

    core: EngineCore
    config: EngineConfig
    info: EngineInfo
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """`num_kernels` compiled for a GPU, none where all of them were `ready`; `error`: why there are not all."""

    gpu: str
    cache: Path
    ready: bool
    num_kernels: int
    error: str | None


@traced("startup.locate")
def locate(model: str | os.PathLike[str], args: EngineArgs) -> tuple[Checkpoint, Entry]:
    """The model's files, and the plugin entry that serves them; imports no plugin and loads no weights."""
    from rapid_infer import hub

    if isinstance(model, os.PathLike):
        # A path never means a name on a hub.
        path = os.path.abspath(model)
        if not os.path.isdir(path):
            raise ConfigError(f"model {os.fspath(model)!r} is a path, but no directory is there: give text for a hub")
        model = path
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a directory, a name such as 'Qwen/Qwen3-8B', or 'demo', got {model!r:.80}")
    checkpoint = read_checkpoint(hub.resolve(model, revision=args.revision, hub=args.hub))
    return checkpoint, ModelRegistry.lookup(checkpoint.architecture, args.model_plugin, args.model_impl)


@traced("startup.configure")
def configure(checkpoint: Checkpoint, entry: Entry, args: EngineArgs) -> ConfiguredModel:
    """Import the plugin, ask the device, and decide every option."""
    with span("startup.imports"):
        from rapid_infer.worker.contract import check_class, read_config

        cls = ModelRegistry.load(entry)
        check_class(cls, entry)
    with span("startup.device"):
        device = probe(args.device)
    with span("startup.config"):
        model_config = read_config(cls, checkpoint)
    info = CheckpointInfo(model_config.max_position_embeddings, checkpoint.dtype)
    return ConfiguredModel(cls, model_config, args.resolve(info, device))


def start_engine(
    checkpoint: Checkpoint, entry: Entry, args: EngineArgs, *, with_tokenizer: bool = False
) -> StartedEngine:
    """Load the model; its kernels are compiled meanwhile. ConfigError, PluginError, WeightError."""
    with KernelCompiler(checkpoint.path, entry, args, DRY_RUN) as compiler, _all_kept():
        model = configure(checkpoint, entry, args)
        config = model.config
        for note in config.notes:
            logger.info("%s", note)
        compiler.aim(config, model.model_config, model.gpu)
        # Kernels are compiled by now, and what is wrong with it shows before the weights are read.
        tokenizer = Tokenizer(checkpoint.path) if with_tokenizer else None
        wait = partial(compiler.wait, terminal_count)
        core = EngineCore(config, _start_executor(model, checkpoint, entry, wait))
    info = EngineInfo(
        architecture=core.info.architecture,
        dtype=core.info.dtype,
        device=config.device,
        vocab_size=core.info.vocab_size,
        max_model_len=core.info.max_model_len,
        stop_token_ids=checkpoint.stop_token_ids,
        seed=config.model.seed,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        default_sampling_params=defaults_of(checkpoint.generation),
        max_num_seqs=config.scheduler.max_num_seqs,
        tool_parser=getattr(model.cls, "tool_parser", None),
        reasoning_parser=getattr(model.cls, "reasoning_parser", None),
    )
    return StartedEngine(core, config, info, tokenizer)


def _start_executor(
    model: ConfiguredModel, checkpoint: Checkpoint, entry: Entry, wait_for_kernels: Callable[[], object]
) -> Executor:
    known = model.cls, model.model_config, checkpoint, model.config, wait_for_kernels
    if model.config.parallel.tensor_parallel_size == 1:
        from rapid_infer.executors.in_process import InProcessExecutor

        return InProcessExecutor(*known)
    from rapid_infer.executors.multi_process import MultiProcessExecutor

    return MultiProcessExecutor(*known, target=entry.target)


def compile_kernels(checkpoint: Checkpoint, entry: Entry, args: EngineArgs) -> WarmedUp:
    """Compile what `start_engine` would, with nothing loaded. ConfigError where there is no GPU to compile for."""
    with KernelCompiler(checkpoint.path, entry, args, DRY_RUN) as compiler:
        model = configure(checkpoint, entry, args)
        gpu = model.gpu
        if gpu is None or compiler.kernels is None:
            raise ConfigError(
                f"warm-up compiles kernels for a GPU, and this process sees {'none' if gpu is None else 'no Triton'}; "
                f"run it on a machine with a GPU of the kind that will run the model"
            )
        ready = compiler.kernels.complete(gpu)
        compiler.aim(model.config, model.model_config, gpu)
        done = compiler.wait(terminal_count)
    return WarmedUp(gpu.name, compiler.kernels.cache, ready, done.total, done.error)


@contextmanager
def _all_kept() -> Iterator[None]:
    """What is made inside stays for good: keep the garbage collector from walking over it again and again.

    Afterwards that would be 3 % of a small model's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
    gc.collect()
    gc.freeze()
