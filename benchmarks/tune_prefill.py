"""Times the Triton attention of prompts, in many configurations, against cuDNN and FlashAttention on this GPU."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import op_timing
from common.prefill_cases import HEAD_DIM, HEADS, HOPPER, Task, candidates, cudnn, flash, make, sampled, tasks
from torch import Tensor

from rapid_infer.ops.providers.triton.attention import prefill as attention_prefill
from rapid_infer.ops.providers.triton.attention.prefill_config import PrefillConfig, choose, has_hopper_kernel
from rapid_infer.ops.providers.triton.attention.tile import score_scales, tile_constants

EXAMPLES = """\
What it does: compiles every candidate in parallel processes, then, for each case, checks a sample of tokens against
fp32 and times calls in a CUDA graph. Prints microseconds and TFLOP/s of what is seen (of a prompt, half the square):
cuDNN on contiguous keys, FlashAttention 3 if vLLM is installed and 4 if flash-attn-4 is, what `choose` takes today
("now"), and every candidate.

examples
  everything, under two minutes on an H200 with 16 cores:
    python benchmarks/tune_prefill.py --output results/prefill.json
  a first look:
    python benchmarks/tune_prefill.py --quick
  some cases only:
    python benchmarks/tune_prefill.py --only 512x32,mixed --heads 32
"""


def call(case: dict[str, Any], out: Tensor, config: PrefillConfig) -> None:
    q, k, v = (case[name] for name in ("q", "k_cache", "v_cache"))
    scales, constants = score_scales(case["params"].scale, None), tile_constants(q, k)
    attention_prefill.prefill(q, k, v, out, None, case["metadata"], None, None, scales, constants, config)


def compile_one(job: tuple[int, int, PrefillConfig]) -> tuple[tuple[int, int, PrefillConfig], str | None]:
    """Run once, which leaves the kernel in Triton's cache on disk."""
    heads, kv_heads, config = job
    try:
        case = make(Task("", (200,), (200,), heads, kv_heads))
        call(case, torch.empty_like(case["q"]), config)
        torch.cuda.synchronize()
    except Exception as error:
        return job, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return job, None


def baseline(task: Task, make_run: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    try:
        return timed(task, make_run())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"}


def timed(task: Task, run: Callable[[], Any]) -> dict[str, Any]:
    us = op_timing.time_calls([run], "cuda", 5).seconds * 1e6
    return {"us": us, "TFLOP/s": task.flops / us / 1e6}


def line(config: PrefillConfig) -> str:
    """As it would be written."""
    plain = asdict(PrefillConfig(0, 0, 0, 0))
    changed = [f"{key}={value}" for key, value in list(asdict(config).items())[2:] if value != plain[key]]
    return f"PrefillConfig({', '.join([str(config.queries), str(config.keys), *changed])})"


def show(label: str, row: dict[str, Any], name: str) -> None:
    figures = f"{row['us']:9.1f} us {row['TFLOP/s']:6.1f} TFLOP/s" if "us" in row else f"failed: {row['error']}"
    print(f"{label:>6} {figures}  {name}", flush=True)


def measure(task: Task, configs: list[PrefillConfig], failed: dict[Any, str], sms: int) -> dict[str, Any]:
    case = make(task)
    index, expected = sampled(task, case)
    print(f"{task.name}, heads {task.heads}/{task.kv_heads}", flush=True)
    base: dict[str, Any] = {}
    if task.whole:
        base["cudnn"] = baseline(task, lambda: cudnn(task))
    for version in (3, 4):
        base[f"fa{version}"] = baseline(task, lambda version=version: flash(case, version))
    for name, row in base.items():
        show("", row, name)
    hopper = has_hopper_kernel(torch.device("cuda"))
    today = choose(sum(task.query_lens), task.heads, HEAD_DIM, torch.bfloat16, True, sms, hopper)
    rows = []
    for config in configs if today in configs else [*configs, today]:
        row: dict[str, Any] = {"config": asdict(config), "line": line(config)}
        error = failed.get((task.heads, task.kv_heads, config))
        if error is None:
            out = torch.full_like(case["q"], float("nan"))
            call(case, out, config)
            worst = (out[index].float() - expected).abs().max().item()
            # Of values around 1, rounded to bf16; NaN too is an error.
            error = f"off by {worst:.3g}" if not worst < 0.03 else "tokens left out" if out.isnan().any() else None
        if error is None:
            row |= timed(task, lambda out=out, config=config: call(case, out, config))
        else:
            row["error"] = error
        rows.append(row)
    for row in sorted(rows, key=lambda row: row.get("us", float("inf"))):
        show("now" if row["line"] == line(today) else "", row, row["line"])
    return {"task": asdict(task), "baselines": base, "results": rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three cases with 32/8 heads, fewer candidates")
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(dict.fromkeys(t.name for t in tasks()))}")
    parser.add_argument("--heads", type=int, metavar="N", help=f"of {','.join(str(h) for h, _ in HEADS)}")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="compiling processes (default 16)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON with every time")
    ns = parser.parse_args()
    names = ns.only.split(",") if ns.only else ["8192x2", "2048x8", "512x32"] if ns.quick else None
    heads = ns.heads or (32 if ns.quick else None)
    chosen = [t for t in tasks() if (names is None or t.name in names) and heads in (None, t.heads)]
    if not chosen or not torch.cuda.is_available():
        parser.error("needs a GPU, and names as --help lists them")
    torch.manual_seed(0)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    configs = candidates(ns.quick) + HOPPER * has_hopper_kernel(torch.device("cuda"))
    jobs = [(h, kv, config) for h, kv in dict.fromkeys((t.heads, t.kv_heads) for t in chosen) for config in configs]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(ns.workers, len(jobs))) as pool:
        errors = {job: error for job, error in pool.imap_unordered(compile_one, jobs) if error}
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - started:.0f} s, {len(errors)} cannot run")
    results = []
    for task in chosen:
        results.append(measure(task, configs, errors, sms))
        if ns.output:
            ns.output.parent.mkdir(parents=True, exist_ok=True)
            ns.output.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
    print(f"\nbest of each case, after {time.perf_counter() - started:.0f} s")
    for found in results:
        good = [row for row in found["results"] if "us" in row]
        best = min(good, key=lambda row: row["us"], default=None)
        if best is not None:
            show("", best, f"{found['task']['name']} {found['task']['heads']}: {best['line']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
