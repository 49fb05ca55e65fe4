"""Numbers of other engines: recorded ones by model and workload, and the ratio of ours to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from common.workloads import DATA

RECORDED = "baseline_vllm_h200.json"
RECORDED_GPU = "H200"
RECORDED_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Setup:
    """What must be equal for a recorded number to be comparable."""

    model: str
    workload: str | None
    dtype: str
    gpus: Sequence[str]
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1


@cache
def recorded() -> dict[str, Any]:
    """What data/baseline_vllm_h200.json holds: "device" and "rows"."""
    return json.loads((DATA / RECORDED).read_text(encoding="utf-8"))


def find(setup: Setup) -> dict[str, Any] | None:
    """The recorded row of this model, workload and number of ranks."""
    for row in recorded()["rows"]:
        same_work = (row["model"], row["workload"]) == (setup.model, setup.workload)
        expert = row.get("expert_parallel", False) == (setup.expert_parallel_size > 1)
        if same_work and row.get("tensor_parallel_size", 1) == setup.tensor_parallel_size and expert:
            return row
    return None


def obstacle(setup: Setup) -> str | None:
    """Why a recorded number cannot be compared with one of this setup; None when it can."""
    if not setup.gpus or RECORDED_GPU not in setup.gpus[0]:
        return f"recorded on an {RECORDED_GPU}, this ran on {setup.gpus[0] if setup.gpus else 'a CPU'}"
    if setup.dtype != RECORDED_DTYPE:
        return f"recorded in {RECORDED_DTYPE}, this ran in {setup.dtype}"
    return None


def compare(setup: Setup, wall_s: float, output_tokens_per_s: float) -> dict[str, Any] | None:
    """The recorded peer beside our best run, for `Result.peers`; None when nothing was recorded for this work."""
    row = find(setup)
    if row is None:
        return None
    why = obstacle(setup)
    return {
        "engine": f"{row['engine']} {row['version']}",
        "source": "recorded",
        "device": recorded()["device"],
        "row": row,
        "not_comparable": why,
        # Not of the recorded rate, which has one decimal: of 16 tokens that is 1 % off.
        "ratio": None if why else output_tokens_per_s / (row["out_tok"] / row["s"]),
        "wall_ratio": None if why else row["s"] / wall_s,
    }


def describe(peer: Mapping[str, Any]) -> str:
    """One line on a recorded peer."""
    row = peer["row"]
    text = f"{peer['engine']} (recorded): {row['s']:.4f} s, {row['out_tok_s']:.1f} output tokens/s"
    if peer["not_comparable"]:
        return f"{text}; no ratio: {peer['not_comparable']}"
    routing = f"; its routing was {row['routing']}" if "routing" in row else ""
    return f"{text}; ratio {peer['ratio']:.3f} (above 1: ours is faster){routing}"
