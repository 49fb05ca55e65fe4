"""Operators one by one: every provider that can run here, on the shapes of the fixed models, against the device."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import environment, op_calls, op_cases, op_cases_experts, op_shapes, op_timing  # noqa: F401
from common.op_shapes import OpCase, Shape
from common.op_timing import Timing
from common.output import Report, command_line
from common.schema import Result

from rapid_infer.ops import OPS, OpInfo, load_providers
from rapid_infer.ops.registry import REFERENCE, Provider

EXAMPLES = """\
What it does: builds inputs in the shapes of a model, runs every provider of every operator on them that can run on
this device, and times it. On a GPU several calls are recorded in one CUDA graph, and the median of its replays counts,
so the host's time to launch is not in the figures; weights and cache pages are cold, as in a model, because the calls
cycle over copies of more than 200 MB. On a CPU it is the median of single calls.

Read a line so: `us` is one call. `TB/s` and `TFLOP/s` are the bytes and operations that the work cannot do without,
over that time; the share beside them is of what this device did on a large copy or sum and a large matrix product at
the start of the run. A kernel is done when one of the two shares is near 100 %. `vs torch` is how many times faster
than the reference; `diff` is the relative norm of the difference to it (integers: the share that differs).

examples
  all operators, both models (on a GPU, minutes):
    python benchmarks/bench_ops.py --output results/ops.json
  one operator, two providers side by side:
    python benchmarks/bench_ops.py --op paged_attention --provider triton --provider vllm_flash_attn
  what can be tried anywhere in a minute:
    python benchmarks/bench_ops.py --quick --model qwen3-0.6b
"""
HEADER = (
    f"{'op':<22} {'case':<30} {'provider':<16} {'us':>10} {'TB/s':>7} {'peak':>6} {'TFLOP/s':>8} {'peak':>6} "
    f"{'vs torch':>9} {'diff':>8}  timed"
)


@dataclass(frozen=True)
class Measurement:
    """One provider on one case. `speedup` is the reference's time over this one's."""

    op: str
    model: str
    case: str
    provider: str
    seconds: float
    timed: str
    calls: int
    bytes: int
    flops: int
    bytes_per_s: float
    share_of_copy: float
    flops_per_s: float
    share_of_product: float
    speedup: float
    difference: float


class Bench:
    def __init__(self, ns: argparse.Namespace) -> None:
        self.report = Report()
        self.device: str = ns.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype: torch.dtype = getattr(torch, ns.dtype)
        self.repeats: int = ns.repeats or (5 if ns.quick else 20)
        self.providers: list[str] = ns.provider
        self.peaks = op_timing.measure_peaks(self.device, self.dtype, self.repeats)
        self.found: list[Measurement] = []
        self.skipped: dict[str, str] = {}
        self.failed = 0

    def run(self, ops: list[str], shapes: list[Shape]) -> None:
        peaks = self.peaks
        self.report.say(
            f"{self.device}, {self.dtype}: copy or sum of {peaks.moved} {peaks.bytes_per_s / 1e12:.3f} TB/s, product "
            f"{peaks.product} {peaks.flops_per_s / 1e12:.3f} TFLOP/s\n\n{HEADER}"
        )
        for shape in shapes:
            self.report.say(f"--- {shape.model}")
            for op in ops:
                try:
                    for case in op_shapes.cases(op, shape):
                        self._case(shape, case)
                except LookupError as reason:
                    self.skipped[op] = str(reason)
        for name, reason in sorted(self.skipped.items()):
            self.report.say(f"not run: {name}: {reason}")

    def _case(self, shape: Shape, case: OpCase) -> None:
        torch.manual_seed(0)
        kwargs = case.make()
        op = OPS[case.op]
        want = op_calls.outputs(op.reference, kwargs, op.mutates)
        # All results before the first timed call: a provider may reuse buffers that others read.
        found = [(provider, self._difference(provider, case, kwargs, want)) for provider in self._able(case)]
        base = self._time(op.providers[REFERENCE], case, kwargs)
        for provider, diff in found:
            try:
                if isinstance(diff, Exception):
                    raise diff
                timing = base if provider.name == REFERENCE else self._time(provider, case, kwargs)
            except Exception as error:
                self.failed += 1
                self.report.say(f"{case.op:<22} {case.label:<30} {provider.name:<16} failed: {error!r}")
                continue
            self._note(shape, case, provider.name, timing, base, diff)
        del kwargs, want
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _able(self, case: OpCase) -> Iterator[Provider]:
        """Providers that were asked for and can run it, the best first."""
        for provider in sorted(OPS[case.op].providers.values(), key=lambda p: -p.priority):
            if self.providers and provider.name not in self.providers:
                continue
            if reasons := provider.supports(OpInfo.of(self.device, self.dtype, **case.extra)):
                self.skipped[f"{case.op}={provider.name}"] = "; ".join(reasons)
                continue
            yield provider

    def _difference(self, provider: Provider, case: OpCase, kwargs: dict[str, Any], want: Any) -> float | Exception:
        try:
            got = op_calls.outputs(provider.fn, op_calls.prepared(provider, kwargs), OPS[case.op].mutates)
            return op_timing.difference(got, want)
        except Exception as error:
            return error

    def _time(self, provider: Provider, case: OpCase, kwargs: dict[str, Any]) -> Timing:
        """All calls share one metadata: what a provider derives from it is made while warming up, and is not timed."""
        kwargs = op_calls.fresh(kwargs)
        cold = [kwargs[name] for name in case.cold]
        count = op_timing.copies_for(sum(tensor.nbytes for tensor in cold), self.device)
        own = (*case.cold, *case.reused, *OPS[case.op].mutates)
        copies = [op_calls.prepared(provider, op_calls.clone(kwargs, own)) for _ in range(count)]
        calls: list[op_timing.Call] = [partial(provider.fn, **arguments) for arguments in copies]
        slow_reference = provider.name == REFERENCE and case.op == "paged_attention"
        repeats = 3 if slow_reference else self.repeats
        restores = [partial(op_calls.restore, arguments, kwargs, case.reused) for arguments in copies]
        return op_timing.time_calls(calls, self.device, repeats, not slow_reference, restores if case.reused else ())

    def _note(self, shape: Shape, case: OpCase, provider: str, timing: Timing, base: Timing, diff: float) -> None:
        seconds, peaks = timing.seconds, self.peaks
        moved, done = case.bytes / seconds, case.flops / seconds
        found = Measurement(
            case.op,
            shape.model,
            case.label,
            provider,
            seconds,
            timing.how,
            timing.calls,
            case.bytes,
            case.flops,
            moved,
            moved / peaks.bytes_per_s,
            done,
            done / peaks.flops_per_s,
            base.seconds / seconds,
            diff,
        )
        self.found.append(found)
        product = f"{done / 1e12:8.2f} {found.share_of_product:6.1%}" if case.flops else f"{'':15}"
        self.report.say(
            f"{case.op:<22} {case.label:<30} {provider:<16} {seconds * 1e6:10.2f} {moved / 1e12:7.3f} "
            f"{found.share_of_copy:6.1%} {product} {found.speedup:8.2f}x {diff:8.1e}  {timing.how}"
        )


def _result(bench: Bench, ns: argparse.Namespace, models: list[str], load_average: float | None) -> Result:
    return Result(
        name="ops",
        environment=environment.collect(load_average),
        model={"names": models, "dtype": ns.dtype},
        engine_options={},
        command=command_line(),
        workload={"quick": ns.quick, "block_size": op_cases.BLOCK_SIZE, "device": bench.device},
        samples=[],
        metrics={
            "peaks": dataclasses.asdict(bench.peaks),
            "cases": [dataclasses.asdict(found) for found in bench.found],
            "skipped": bench.skipped,
        },
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--op", action="append", default=[], metavar="NAME", help="only this operator; may be given again")
    p.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="only this provider; may be given again (the reference is always timed, for the ratio)",
    )
    p.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="M",
        help="shapes of this model: a name in data/workloads.json or a directory with config.json; may be given again "
        "(default qwen3-8b and qwen3-0.6b)",
    )
    p.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    p.add_argument("--quick", action="store_true", help="the two smallest sizes of each kind, few repeats")
    p.add_argument("--repeats", type=int, metavar="N", help="timed replays or calls (default 20, quick 5)")
    p.add_argument("--output", type=Path, metavar="FILE.json", help="write the result here, and FILE.log beside it")
    return p


def _checked(ns: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The operators to run; the parser's error for a name that does not exist."""
    known = {name for op in OPS.values() for name in op.providers}
    for kind, names, there in (("op", ns.op, set(OPS)), ("provider", ns.provider, known)):
        if unknown := [name for name in names if name not in there]:
            parser.error(f"unknown {kind} {', '.join(unknown)}; expected {', '.join(sorted(there))}")
    return ns.op or list(OPS)


def _shapes(ns: argparse.Namespace, models: list[str], device: str) -> Iterator[Shape]:
    for model in models:
        yield Shape.of(model, getattr(torch, ns.dtype), device, ns.quick)


@torch.inference_mode()
def main() -> int:
    parser = _parser()
    ns = parser.parse_args()
    load_average = environment.load_average()
    load_providers()
    ops = _checked(ns, parser)
    models = ns.model or ["qwen3-8b", "qwen3-0.6b"]
    try:
        shapes = list(_shapes(ns, models, ns.device or ("cuda" if torch.cuda.is_available() else "cpu")))
    except ValueError as error:
        parser.error(str(error))
    bench = Bench(ns)
    bench.run(ops, shapes)
    if ns.output:
        bench.report.write(_result(bench, ns, models, load_average), ns.output, detail=True)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
