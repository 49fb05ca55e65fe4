"""One extra run under torch's profiler: it finds places to look at, its times are never reported as results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.runner import run_engine
from common.workloads import Request
from rapid_infer import profiling
from rapid_infer.llm_engine import LLMEngine

TOP = 25


def profile(
    engine: LLMEngine, requests: Sequence[Request], directory: Path, prefix: str, steps: int
) -> tuple[str, Path]:
    """Record the first `steps` engine steps with the engine's own spans; (table of the most expensive ops, trace)."""
    left = steps

    def after_step() -> None:
        # Steps after these run unrecorded: a trace of thousands would take minutes to write.
        nonlocal left
        left -= 1
        if left == 0:
            recorded.stop()

    with profiling.profile(directory, prefix) as recorded:
        run_engine(engine, requests, after_step=after_step)
    order = "self_cuda_time_total" if engine.config.device == "cuda" else "self_cpu_time_total"
    table = recorded.profiler.key_averages().table(sort_by=order, row_limit=TOP, max_name_column_width=60)
    return table, recorded.path
