"""Prints which kernels are planned for a checkpoint on an H200, as JSON: from one layer of each kind, from all, without
graphs, and which of them are missing for steps that an engine makes.

`python planned_kernels.py CHECKPOINT...`, in a process without Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton.runtime.jit import JITFunction

from rapid_infer import LLM
from rapid_infer.config import CheckpointFacts, DeviceFacts, EngineArgs
from rapid_infer.device import GpuFacts, assume_gpu
from rapid_infer.engine.step_plan import StepPlan
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.ops.providers import triton as triton_ops
from rapid_infer.registry import ModelRegistry
from rapid_infer.worker import kernel_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from cold_start import every_kind_of_step

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "dtype": "bfloat16"}


def planned(path: str, take: Callable[[Any], object] | None = None, **options: Any) -> list[str]:
    checkpoint = read_checkpoint(Path(path))
    cls: Any = ModelRegistry.load(ModelRegistry.lookup(checkpoint.architecture))
    model_config = cls.read_config(checkpoint.hf_config)
    args = EngineArgs(**{**OPTIONS, **options})
    facts = CheckpointFacts(model_config.max_position_embeddings, "bfloat16")
    config = args.resolve(facts, DeviceFacts("cuda", True, 1 << 37))
    found: list[Any] = []
    kernel_plan.plan_kernels(cls, model_config, checkpoint, config, take or found.append)
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
    run_eager, found = kernel_plan._Steps.run_eager, list[str]()

    def also_traffic(steps: Any) -> None:
        run_eager(steps)
        found.append("")
        steps._eager_plans = lambda: plans
        run_eager(steps)

    kernel_plan._Steps.run_eager = also_traffic
    try:
        planned(path, take=lambda launch: found.append(f"{launch.name} {launch.kwargs}"), **TRAFFIC, enforce_eager=True)
    finally:
        kernel_plan._Steps.run_eager = run_eager
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


def main(paths: list[str]) -> dict[str, Any]:
    assume_gpu(GpuFacts("NVIDIA H200", (9, 0), 132))
    distinct = kernel_plan.distinct_layers
    results: dict[str, Any] = {}
    for path in paths:
        few = planned(path)
        kernel_plan.distinct_layers = lambda model: contextlib.nullcontext()
        results[path] = {"few": few, "all": planned(path), "eager": planned(path, enforce_eager=True)}
        kernel_plan.distinct_layers = distinct
        results[path]["missing"] = missing(path)
    results["hashes differ"] = hashes_differ()
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
