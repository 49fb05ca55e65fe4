"""Several ranks against one: time, efficiency, and how much of it sums over ranks take."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from common import metrics, options, session, workloads
from common.runner import run_engine
from common.waits import timed

from rapid_infer import startup
from rapid_infer.executors.in_process import InProcessExecutor
from rapid_infer.outputs import RequestOutputKind
from rapid_infer.parallel import ParallelState
from rapid_infer.parallel.comm import EmptyComm

EXAMPLES = """\
What it does: runs the same requests on one rank, on N, and on one rank of N by itself, whose sums over ranks are left
empty. Efficiency is the time of one rank over N times the time of N. What N ranks take longer than one of them by
itself is what sums cost that nothing hides; steps are counted, so it is given per step too. The host's share is what
the process that plans does not spend waiting for results of ranks. TGS is new tokens per second and rank.

--alone R/N does the last of the three only: a rank's part of the model on one GPU, which bounds what N GPUs can reach.

examples
  two GPUs, random weights:
    python benchmarks/bench_parallel.py --model qwen3-8b --tp 2 --workloads latency-b1 latency-b32 mixed-256
  experts shared out:
    python benchmarks/bench_parallel.py --model qwen3-30b-a3b --tp 2 --ep 2 --uniform-routing --workloads latency-b1
  one GPU, the first of four ranks:
    python benchmarks/bench_parallel.py --model qwen3-8b --alone 0/4 --workloads latency-b1
"""


def place(text: str) -> tuple[int, int]:
    rank, _, ranks = text.partition("/")
    if not (rank.isdigit() and ranks.isdigit() and int(rank) < int(ranks)):
        raise argparse.ArgumentTypeError(f"expected R/N with R below N, such as 0/2, got {text!r}")
    return int(rank), int(ranks)


@contextmanager
def alone(rank: int) -> Iterator[None]:
    """Engines over several ranks that are opened inside run this one of them in this process, with empty sums."""

    def start(model: Any, checkpoint: Any, entry: Any, wait: Any) -> InProcessExecutor:
        sizes = model.config.parallel
        ranks = sizes.tensor_parallel_size
        parallel = ParallelState(rank, ranks, ep_size=sizes.expert_parallel_size, comm=EmptyComm(ranks))
        return InProcessExecutor(model.cls, model.model_config, checkpoint, model.config, wait, parallel)

    before = startup._start_executor
    startup._start_executor = start
    try:
        yield
    finally:
        startup._start_executor = before


class _Benchmark(session.Session):
    def run(self) -> int:
        ns = self.ns
        print(f"links: {topology()}")
        if ns.alone is not None:
            rank, ranks = ns.alone
            self._time(f"rank {rank} of {ranks} by itself", ranks, rank)
            return 0
        one = self._time("1 rank", 1, None)
        lone = self._time(f"rank 0 of {ns.tp} by itself", ns.tp, 0)
        several = self._time(f"{ns.tp} ranks", ns.tp, None)
        for name in ns.workloads:
            (t1, _, _), (t0, _, _), (tn, steps, tokens) = one[name], lone[name], several[name]
            sums = tn - t0
            print(
                f"{name}: {t1 / tn:.2f} times one rank, efficiency {t1 / tn / ns.tp:.0%}, TGS "
                f"{tokens / tn / ns.tp:.0f}; sums {sums / tn:.0%}, {sums / max(steps, 1) * 1e6:.0f} us a step"
            )
        return 0

    def _time(self, what: str, ranks: int, rank: int | None) -> dict[str, tuple[float, int, int]]:
        """By workload (seconds of the best run, steps, new tokens)."""
        found = {}
        waits: list[float] = []
        sizes = {"tensor_parallel_size": ranks, "expert_parallel_size": min(self.ns.ep, ranks)}
        with nullcontext() if rank is None else alone(rank), self.open(**sizes) as (engine, load_s):
            print(f"{what}: {engine.config.model.dtype} on {engine.config.device}, loaded in {load_s:.1f} s")
            executor = engine.core.executor
            executor.collect = timed(executor.collect, waits)  # type: ignore[method-assign]
            for name in self.ns.workloads:
                requests = workloads.named(name).requests(engine.core.info.vocab_size)
                samples, shares, steps = [], [], 0
                for _ in range(self.ns.runs + 1):
                    waits.clear()
                    before = engine.core.scheduler.last_step
                    samples.append(run_engine(engine, requests, RequestOutputKind.FINAL_ONLY).sample)
                    steps = engine.core.scheduler.last_step - before
                    shares.append(1 - sum(waits) / samples[-1].wall_s)
                index = metrics.best(samples[1:]) + 1
                best = samples[index].wall_s
                tokens = sum(wanted for _, wanted in requests)
                found[name] = (best, steps, tokens)
                host = f", host {shares[index]:.0%}" if ranks > 1 and rank is None else ""
                step = f"{best / max(steps, 1) * 1e3:.3f} ms a step{host}"
                print(f"  {name}: {best:.4f} s, {tokens / best:.1f} tok/s, {step}")
        return found


def topology() -> str:
    """How the GPUs are linked, in a line each."""
    try:
        return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"


def main() -> int:
    parser = options.engine_parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--workloads", nargs="+", default=["latency-b1"], choices=workloads.workload_names())
    parser.add_argument("--tp", type=options.positive, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--ep", type=options.positive, default=1, metavar="N", help="expert_parallel_size (default 1)")
    parser.add_argument("--alone", type=place, metavar="R/N", help="only rank R of N, by itself, with empty sums")
    ns = parser.parse_args()
    return session.run(lambda scratch: _Benchmark("parallel", ns, scratch))


if __name__ == "__main__":
    sys.exit(main())
