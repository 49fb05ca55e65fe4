"""Times the Triton products of few tokens, in many configurations, against cuBLAS on this GPU."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import op_timing
from common.linear_tasks import FORMATS, TASKS, TOKENS, Task, candidates, operands, rows_class, today
from torch import Tensor

from rapid_infer.ops.providers.triton.activation import silu_and_mul
from rapid_infer.ops.providers.triton.linear import linear as provider
from rapid_infer.ops.providers.triton.quantized import linear as quantized
from rapid_infer.ops.quantized import QuantizedMatrix
from rapid_infer.ops.reference.lm_head import lm_head

EXAMPLES = """\
What it does: compiles every candidate in parallel processes, then, for each shape and number of tokens, checks it
against fp32 and times it in a CUDA graph whose calls go round enough copies of the weight that the L2 cache holds none
of them. Prints cuBLAS (of quantized matrices: written out in 16 bits first), what `choose` takes today, and the best
three with the speed at which each reads its weight. At the end it prints the lines for linear/tuned.py or
quantized/tuned.py: per class of tokens, what is fastest in total.

examples
  everything, about three minutes on an H200 with 16 cores:
    python benchmarks/tune_linear.py --output results/linear.json
  a first look:
    python benchmarks/tune_linear.py --quick
  quantized matrices, whose lines are for quantized/tuned.py:
    python benchmarks/tune_linear.py --format mxfp4,fp8_row --only 8b-qkv,8b-o,8b-gated,8b-down
  some shapes only, such as one rank's of two:
    python benchmarks/tune_linear.py --only 8b-tp2-qkv,8b-tp2-o --tokens 1,16
"""
COLD_BYTES = 200_000_000


def call(task: Task, x: Tensor, weight: Any, config: Any) -> Any:
    if isinstance(weight, QuantizedMatrix):
        return quantized.product(x, weight, config, x.dtype, task.gated)
    if task.op == "argmax":
        return provider.product_argmax(x, weight, config)
    return provider.product(x, weight, config, torch.float32 if task.op == "logits" else None, task.gated)


def cublas(task: Task, x: Tensor, weight: Any) -> Any:
    if isinstance(weight, QuantizedMatrix):
        weight = quantized.dequantize(weight, x.dtype)
    if task.op == "linear":
        return F.linear(x, weight)
    if task.op == "gated":
        return silu_and_mul(F.linear(x, weight))
    scores = lm_head.reference(x, weight)
    return scores if task.op == "logits" else scores.max(dim=-1)


def wrong(task: Task, out: Any, exact: Tensor) -> str | None:
    """Why `out` is not right; exact: the fp32 product `[m, rows]`."""
    if task.op == "argmax":
        value, index = out
        best = exact.amax(dim=1)
        error = max(
            (value - best).abs().max().item(), (exact.gather(1, index[:, None])[:, 0] - best).abs().max().item()
        )
        return f"best is {error:.3g} off" if not error < 0.02 * best.abs().max().item() else None
    if task.gated:
        exact = F.silu(exact[:, : task.n]) * exact[:, task.n :]
    error = (out.float() - exact).abs().max().item() / exact.abs().max().item()
    return f"relative error {error:.3g}" if not error < 0.02 else None


def kernel_key(task: Task, m: int, config: Any) -> tuple[Any, ...]:
    """Equal for what compiles to one kernel."""
    if task.form is not None:
        covered = config.lines * 64 * quantized.codes_of(task.form[0]) * config.splits
        return config, task.format, task.gated, quantized.padded_rows(m), task.k % covered == 0
    covered = config.block_k * config.splits
    rows = 1 if config.gemv else rows_class(task, max(m, 2))
    return config, task.op, rows, task.k % covered == 0, config.gemv and task.k > covered


def compile_one(job: tuple[Task, int, Any]) -> tuple[tuple[Any, ...], str | None]:
    """Run once, which leaves the kernel in Triton's cache on disk."""
    task, m, config = job
    try:
        x = torch.zeros(m, task.k, dtype=torch.bfloat16, device="cuda")
        call(task, x, operands(task, 1)[0], config)
        torch.cuda.synchronize()
    except Exception as error:
        return kernel_key(task, m, config), f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return kernel_key(task, m, config), None


def microseconds(run: Callable[[int], Any], calls: int) -> float:
    return op_timing.time_calls([partial(run, i) for i in range(calls)], "cuda", 5).seconds * 1e6


def measure(task: Task, tokens: list[int], failed: dict[tuple[Any, ...], str], sms: int) -> list[dict[str, Any]]:
    some = operands(task, 1)[0]
    size = some.nbytes
    copies = -(-COLD_BYTES // size)
    calls = max(copies, 20 if size < 50e6 else 6)
    weight = operands(task, copies)
    plain = quantized.dequantize(weight[0], torch.float32) if isinstance(weight[0], QuantizedMatrix) else weight[0]
    found = []
    for m in tokens:
        x = torch.randn(m, task.k, dtype=torch.bfloat16, device="cuda")
        exact = F.linear(x.float(), plain.float())
        rows: list[dict[str, Any]] = []
        base = microseconds(lambda i, x=x: cublas(task, x, weight[i % copies]), calls)
        for config in candidates(task, m, sms):
            row: dict[str, Any] = {"config": asdict(config), "line": line(config)}
            row["error"] = failed.get(kernel_key(task, m, config)) or wrong(
                task, call(task, x, weight[0], config), exact
            )
            if row["error"] is None:
                row["us"] = microseconds(lambda i, x=x, c=config: call(task, x, weight[i % copies], c), calls)
                row["TB/s"] = size / row["us"] / 1e6
            rows.append(row)
        good = sorted((row for row in rows if row["error"] is None), key=lambda row: row["us"])
        print(f"{task.name:13} {task.format} m={m:<3} cublas {base:8.2f} us {size / base / 1e6:5.2f} TB/s", flush=True)
        chosen = today(task, m, sms)
        now = [("today", row) for row in good if chosen is not None and row["line"] == line(chosen)]
        for label, row in now + [("best", row) for row in good[:3]]:
            print(f"{label:>24} {row['us']:8.2f} us {row['TB/s']:5.2f} TB/s  {row['line']}", flush=True)
        for row in rows:
            if row["error"] is not None:
                print(f"{'failed':>24} {row['line']}: {row['error']}", flush=True)
        found.append({"task": asdict(task), "m": m, "cublas_us": base, "results": rows})
    return found


def line(config: Any) -> str:
    """As it would be written."""
    first, second, *_ = asdict(config)
    values = asdict(config)
    plain = asdict(type(config)(values[first], values[second]))
    changed = [f"{key}={value}" for key, value in values.items() if value != plain[key]]
    return f"Config({', '.join([str(values[first]), str(values[second]), *changed])})"


def tuned(results: list[dict[str, Any]]) -> list[str]:
    """Per shape and class of tokens the fastest in total, or None for cuBLAS. Of the head, the argmax decides."""
    classes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for found in results:
        task, m = Task(**found["task"]), found["m"]
        if task.op != "logits":
            key = *(task.form or ()), task.n, task.k, rows_class(task, m), task.gated
            classes.setdefault(key, []).append(found)
    lines = []
    for key, group in classes.items():
        totals = {"None": sum(found["cublas_us"] for found in group)}
        timed = [{row["line"]: row["us"] for row in found["results"] if "us" in row} for found in group]
        for name in [name for name in timed[0] if all(name in times for times in timed)]:
            totals[name] = sum(times[name] for times in timed)
        lines.append(f"    {key}: {min(totals, key=totals.__getitem__)},")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four shapes, 1 and 16 tokens")
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(task.name for task in TASKS)}")
    parser.add_argument("--tokens", metavar="N,...", help=f"default {','.join(map(str, TOKENS))}")
    parser.add_argument("--format", default="bf16", metavar="NAMES", help=f"of {','.join(FORMATS)} (default bf16)")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="compiling processes (default 16)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON with every time")
    ns = parser.parse_args()
    quick = ["8b-o", "8b-gated", "8b-argmax", "0.6b-qkv"] if ns.quick else [task.name for task in TASKS]
    names = ns.only.split(",") if ns.only else quick
    formats = ns.format.split(",")
    tasks = [replace(task, format=name) for name in formats for task in TASKS if task.name in names]
    tasks = [task for task in tasks if task.format == "bf16" or task.op in ("linear", "gated")]
    tokens = [int(m) for m in ns.tokens.split(",")] if ns.tokens else [1, 16] if ns.quick else list(TOKENS)
    if (
        not tasks
        or not set(names) <= {task.name for task in TASKS}
        or not set(formats) <= set(FORMATS)
        or not torch.cuda.is_available()
    ):
        parser.error("needs a GPU, and names as --help lists them")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    jobs = {kernel_key(t, m, c): (t, m, c) for t in tasks for m in tokens for c in candidates(t, m, sms)}
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(min(ns.workers, len(jobs))) as pool:
        errors = {key: error for key, error in pool.imap_unordered(compile_one, jobs.values()) if error}
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - started:.0f} s, {len(errors)} cannot run")
    results = []
    for task in tasks:
        results += measure(task, tokens, errors, sms)
        if ns.output:
            ns.output.parent.mkdir(parents=True, exist_ok=True)
            ns.output.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
    print(f"\nTUNED, after {time.perf_counter() - started:.0f} s", *tuned(results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
