"""Prints which kernels are planned for a checkpoint on an H200, as JSON: from one layer of each kind, from all, without
graphs, and which of them are missing for steps that an engine makes; and those of single steps, recorded and run
eagerly, in their order.

`python planned_kernels.py CHECKPOINT...`, in a process without Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from rapid_infer import LLM
from rapid_infer.config import CheckpointInfo, DeviceInfo, EngineArgs, EngineConfig
from rapid_infer.device import GpuInfo, assume_gpu
from rapid_infer.engine.step_plan import StepPlan
from rapid_infer.loader.load import finalize
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.ops.precompile.launches import collect_launches
from rapid_infer.ops.providers import triton as triton_ops
from rapid_infer.registry import ModelRegistry
from rapid_infer.worker import build, dry_run
from rapid_infer.worker.graph_runner import DECODE, GREEDY, MIXED, GraphRunner
from rapid_infer.worker.memory import largest_step
from rapid_infer.worker.program import StepShape

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from cold_start import every_kind_of_step

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "dtype": "bfloat16"}


def described(path: str, **options: Any) -> tuple[Any, Any, Checkpoint, EngineConfig]:
    checkpoint = read_checkpoint(Path(path))
    cls: Any = ModelRegistry.load(ModelRegistry.lookup(checkpoint.architecture))
    model_config = cls.read_config(checkpoint.hf_config)
    args = EngineArgs(**{**OPTIONS, **options})
    info = CheckpointInfo(model_config.max_position_embeddings, "bfloat16")
    return cls, model_config, checkpoint, args.resolve(info, DeviceInfo("cuda", True, 1 << 37))


def planned(path: str, take: Callable[[Any], object] | None = None, **options: Any) -> list[str]:
    cls, model_config, checkpoint, config = described(path, **options)
    found: list[Any] = []
    with collect_launches(take or found.append):
        dry_run.dry_run(cls, checkpoint.path, config, model_config)
    return sorted(f"{launch.name} {[type(arg).__name__ for arg in launch.args]} {launch.kwargs}" for launch in found)


TRAFFIC: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 70, "max_model_len": 300}


def steps_of_traffic(path: str) -> list[StepPlan]:
    """All kinds of steps, by an engine on the CPU."""
    with LLM(path, device="cpu", dtype="float32", skip_tokenizer_init=True, **TRAFFIC) as llm:
        executor, plans = llm.engine.executor, list[StepPlan]()
        launch = executor.launch

        def note(plan: StepPlan) -> Any:
            plans.append(plan)
            return launch(plan)

        executor.launch = note
        every_kind_of_step(llm)
    return plans


def missing(path: str) -> list[str]:
    """Kernels of steps without graphs that were not planned."""
    plans = steps_of_traffic(path)
    run_eager, found = dry_run._Steps.run_eager, list[str]()

    def also_traffic(steps: Any) -> None:
        run_eager(steps)
        found.append("")
        steps._eager_plans = lambda: plans
        run_eager(steps)

    dry_run._Steps.run_eager = also_traffic
    try:
        planned(path, take=lambda launch: found.append(f"{launch.name} {launch.kwargs}"), **TRAFFIC, enforce_eager=True)
    finally:
        dry_run._Steps.run_eager = run_eager
    return found[found.index("") + 1 :]


def hashes_differ() -> list[str]:
    """Functions whose hash, by which compiled kernels are found, depends on which functions were hashed before."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(triton_ops.__name__)]
    functions = {
        f"{value.__module__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.__module__ == module.__name__
    }

    def hashes(names: list[str]) -> dict[str, str]:
        for function in functions.values():
            function.hash, function.used_global_vals = None, {}
        return {name: functions[name].cache_key for name in names}

    one, other = hashes(list(functions)), hashes(list(reversed(functions)))
    return [name for name in functions if one[name] != other[name]]


@contextlib.contextmanager
def in_order(launches: list[str]) -> Iterator[None]:
    """Inside, every launch is noted, with its grid and its numbers."""

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        numbers = [arg for arg in args if isinstance(arg, (int, float))]
        launches.append(f"{kernel.fn.__name__} {grid} {numbers} {sorted(kwargs.items(), key=str)}")

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = run


@torch.inference_mode()
def steps(path: str) -> dict[str, dict[str, list[str]]]:
    """Kernels of a decode step and of a mixed one, as recorded and as run eagerly in the same size."""
    cls, model_config, checkpoint, config = described(path)
    built = build.build_model(cls, checkpoint, config, dry_run.META, model_config)
    finalize(built.model)
    build.allocate_caches(built.model, 64, config.cache.block_size, dry_run.META)
    program = dry_run._Steps(built, config).program
    rows, tokens, longest = config.scheduler.max_num_seqs, 32, config.model.max_model_len
    graphs = GraphRunner(program, dry_run._Rehearsal(), max_tokens=tokens, max_model_len=longest)
    mixed = replace(largest_step(rows, tokens, longest), token_lists=None, features=GREEDY, max_context_len=9)
    decode = replace(largest_step(rows, rows, longest), token_lists=None, features=GREEDY)
    decode = replace(decode, tokens=decode.tokens[:0])
    found: dict[str, dict[str, list[str]]] = {}
    for kind, size, plan in ((DECODE, rows, decode), (MIXED, tokens, mixed)):
        recorded: list[str] = []
        eager: list[str] = []
        with in_order(recorded):
            graphs.capture_forward(kind, size)
            graphs.capture_sample(kind, rows, GREEDY)
        with in_order(eager):
            program.sample(program.forward(StepShape.of(plan, counted=False)), GREEDY)
        found[kind] = {"recorded": recorded, "eager": eager}
    return found


def main(paths: list[str]) -> dict[str, Any]:
    assume_gpu(GpuInfo("NVIDIA H200", (9, 0), 132))
    distinct = dry_run.distinct_layers
    results: dict[str, Any] = {}
    for path in paths:
        few = planned(path)
        dry_run.distinct_layers = lambda model: contextlib.nullcontext()
        results[path] = {"few": few, "all": planned(path), "eager": planned(path, enforce_eager=True)}
        dry_run.distinct_layers = distinct
        results[path]["missing"] = missing(path)
        results[path]["steps"] = steps(path)
    results["hashes differ"] = hashes_differ()
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
