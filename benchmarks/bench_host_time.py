"""What a steady decode step costs the host: the time of an engine step less the wait for the device."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from common import workloads
from common.waits import timed

from rapid_infer.llm_engine import LLMEngine
from rapid_infer.outputs import RequestOutputKind
from rapid_infer.params import SamplingParams

EXAMPLES = """\
What it does: for each number of rows, starts as many requests, waits until all of them decode, and times engine steps
one by one. The wait for the device's event is taken off: what is left is planning, launching and results. Outputs are
asked for at the end only. On a CPU the model itself is part of what the host does.

examples
  an H200:
    python benchmarks/bench_host_time.py
  one number of rows, more steps:
    python benchmarks/bench_host_time.py --rows 256 --steps 400
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(workloads.spec()["models"]))
    parser.add_argument("--rows", action="append", type=int, help="default: 1, 32 and 256")
    parser.add_argument("--steps", type=int, default=150, help="timed steps (default 150)")
    ns = parser.parse_args()
    waits: list[float] = []
    torch.cuda.Event.synchronize = timed(torch.cuda.Event.synchronize, waits)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        path = workloads.write_model(ns.model, Path(scratch))
        engine = LLMEngine(str(path), load_format="dummy", skip_tokenizer_init=True)
        for rows in ns.rows or (1, 32, 256):
            times = _steps(engine, rows, ns.steps, waits)
            ordered = [f"{seconds * 1e6:.0f}" for seconds in (median(times), min(times), times[len(times) * 9 // 10])]
            print(f"{rows} rows: median {ordered[0]} us, least {ordered[1]}, P90 {ordered[2]}", flush=True)
    return 0


def _steps(engine: LLMEngine, rows: int, steps: int, waits: list[float]) -> list[float]:
    """Seconds of the host for each step, ascending."""
    params = SamplingParams(temperature=0, max_tokens=steps + 100, ignore_eos=True)
    for n in range(rows):
        # Lengths differ, so that each step has about as many rows that need a new block.
        prompt = [5 + (n * 7 + i) % 1000 for i in range(100 + n)]
        engine.add_request(f"{rows}-{n}", prompt, params, output_kind=RequestOutputKind.FINAL_ONLY)
    for _ in range(40):
        engine.step()
    times = []
    for _ in range(steps):
        waits.clear()
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started - sum(waits))
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()
    return sorted(times)


if __name__ == "__main__":
    sys.exit(main())
