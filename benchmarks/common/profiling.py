"""One extra run under torch's profiler: it finds places to look at, its times are never reported as results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.runner import run_engine
from common.workloads import Request
from rapid_infer.llm_engine import LLMEngine

TOP = 25


def profile(engine: LLMEngine, requests: Sequence[Request], trace: Path, steps: int) -> str:
    """Record the first `steps` engine steps, write a Chrome trace, and return the table of the most expensive ops."""
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available() and engine.config.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiler = torch.profiler.profile(activities=activities)
    left = steps

    def after_step() -> None:
        # Steps after these run unrecorded: a trace of thousands would take minutes to write.
        nonlocal left
        left -= 1
        if left == 0:
            profiler.stop()

    profiler.start()
    run_engine(engine, requests, after_step=after_step)
    if left > 0:
        profiler.stop()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=TOP, max_name_column_width=60)
