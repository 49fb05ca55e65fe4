"""Prints which kernels are planned for a checkpoint on an H200, as JSON: from one layer of each kind, and from all.

`python planned_kernels.py CHECKPOINT...`, in a process without Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from rapid_infer.config import CheckpointFacts, DeviceFacts, EngineArgs
from rapid_infer.device import GpuFacts, assume_gpu
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.registry import ModelRegistry
from rapid_infer.worker import kernel_plan

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "dtype": "bfloat16"}


def planned(path: str, **options: Any) -> list[str]:
    checkpoint = read_checkpoint(Path(path))
    cls: Any = ModelRegistry.load(ModelRegistry.lookup(checkpoint.architecture))
    model_config = cls.read_config(checkpoint.hf_config)
    args = EngineArgs(**OPTIONS, **options)
    config = args.resolve(CheckpointFacts(64, "bfloat16"), DeviceFacts("cuda", True, 1 << 37))
    found: list[Any] = []
    kernel_plan.plan_kernels(cls, model_config, checkpoint, config, found.append)
    return sorted(f"{launch.name} {[type(arg).__name__ for arg in launch.args]} {launch.kwargs}" for launch in found)


def main(paths: list[str]) -> dict[str, Any]:
    assume_gpu(GpuFacts("NVIDIA H200", (9, 0), 132))
    distinct = kernel_plan.distinct_layers
    results = {}
    for path in paths:
        few = planned(path)
        kernel_plan.distinct_layers = lambda model: contextlib.nullcontext()
        results[path] = {"few": few, "all": planned(path), "eager": planned(path, enforce_eager=True)}
        kernel_plan.distinct_layers = distinct
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
