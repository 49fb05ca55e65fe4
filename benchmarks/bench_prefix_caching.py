"""Prefix caching: requests that share prefixes, with the cache empty, filled, and switched off."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import metrics, options, session
from common.monitor import Monitor
from common.output import MS
from common.runner import run_engine
from common.schema import RunSample
from common.workloads import GroupedWorkload, Request

from rapid_infer.llm_engine import LLMEngine

EXAMPLES = """\
What it does: `--groups` groups of `--group-size` requests, each group with a prefix of its own and each request with a
tail of its own, in turn over the groups. Three phases, each timed `--runs` times:
  off    an engine without prefix caching computes every prompt
  cold   the cache is emptied, so the first request of a group computes the prefix and the others may find it
  warm   right after a cold run: the same prefixes with new tails, so every request may find its prefix
Prompts are random token ids from a fixed seed; answers are greedy and exactly as long as asked.

Read the table so: hit rate is the share of prompt tokens that were not computed, `possible` what whole blocks allow
where each request finds all that an earlier one has; TTFT off/this says how many times sooner the first token comes
than without caching. With all requests at once TTFT is mostly waiting in the queue; `--concurrency 1` shows a single
user's wait.

examples
  the demo model, small:
    python benchmarks/bench_prefix_caching.py --groups 2 --group-size 4 --prefix-len 256 --tail-len 32
  8 groups of 32 requests that share 2048 tokens, random weights, result kept:
    python benchmarks/bench_prefix_caching.py --model qwen3-8b --output results/prefix-8b.json
  one request at a time:
    python benchmarks/bench_prefix_caching.py --model qwen3-8b --group-size 4 --concurrency 1
"""

PHASES = ("off", "cold", "warm")


class Benchmark(session.Session):
    def __init__(self, ns: argparse.Namespace, scratch: Path) -> None:
        super().__init__("prefix-caching", ns, scratch)
        session.refuse(self.kwargs, "enable_prefix_caching", "both are measured")
        self.workload = GroupedWorkload(ns.groups, ns.group_size, ns.prefix_len, ns.tail_len, ns.output_len)
        tokens = ns.prefix_len + ns.tail_len + ns.output_len
        remedy = "shorten --prefix-len, --tail-len or --output-len"
        session.check_length("prefix, tail and answer", tokens, self.config().model.max_model_len, remedy)
        self.samples: list[RunSample] = []
        self.load_s: dict[str, float] = {}
        self.resources: dict[str, Any] = {}

    def run(self) -> int:
        with self.open() as (engine, load_s):
            cold, warm = (self.workload.requests(engine.core.info.vocab_size, part) for part in range(2))
            self.introduce(engine, load_s)
            self._introduce(engine)
            gpus, block_size = session.gpus_of(engine.config), engine.core.info.block_size
            model, options_on = self.model_info(engine), session.resolved(engine.config)
            self._time(engine, load_s, "on", {"cold": cold, "warm": warm})
        with self.open(enable_prefix_caching=False) as (engine, load_s):
            options_off = session.resolved(engine.config)
            self._time(engine, load_s, "off", {"off": warm})
        phases = {name: self._figures(name, block_size, gpus) for name in PHASES}
        self._table(phases)
        result = self.result(
            model,
            {"resolved": {"on": options_on, "off": options_off}},
            {
                **dataclasses.asdict(self.workload),
                "requests": len(cold),
                "concurrency": self.ns.concurrency,
                "sampling": "greedy, end-of-sequence ignored",
            },
            self.samples,
            {"phases": phases, "load_s": self.load_s, "resources": self.resources},
        )
        if self.ns.output:
            self.report.write(result, self.ns.output, self.ns.detail)
        return 1 if any(phase["all_runs"]["errors"] for phase in phases.values()) else 0

    def _introduce(self, engine: LLMEngine) -> None:
        work = self.workload
        at_once = self.ns.concurrency or "all"
        self.report.say(
            f"{work.groups} groups of {work.size} requests, {work.prefix} prompt tokens shared and {work.tail} their "
            f"own, {work.output} to generate, {at_once} at once; blocks of {engine.core.info.block_size} tokens; "
            f"{self.ns.warmup} warm-up and {self.ns.runs} timed runs"
        )
        self.warn_of_other_work()

    def _time(self, engine: LLMEngine, load_s: float, caching: str, phases: dict[str, Sequence[Request]]) -> None:
        """Run `phases` in turn; the cache is emptied before the first of them."""
        gpus = session.gpus_of(engine.config)
        self.load_s[caching] = load_s

        def once() -> list[RunSample]:
            return [
                run_engine(engine, requests, concurrency=self.ns.concurrency, keep_cache=number > 0, label=name).sample
                for number, (name, requests) in enumerate(phases.items())
            ]

        for _ in range(self.ns.warmup):
            once()
        with Monitor(gpus, sample=not self.ns.no_monitor) as monitor:
            for number in range(self.ns.runs):
                samples = once()
                self.samples += samples
                times = ", ".join(f"{sample.label} {sample.wall_s:.4f} s" for sample in samples)
                self.report.say(f"run {number + 1}: {times}")
        self.resources[caching] = dataclasses.asdict(monitor.resources)
        self.say_errors(self.samples[-len(phases) * self.ns.runs :])

    def _figures(self, phase: str, block_size: int, gpus: int) -> dict[str, Any]:
        runs = [sample for sample in self.samples if sample.label == phase]
        pooled = metrics.compute(runs, gpus)
        firsts, others = (
            metrics.summarize(
                metrics.ttft(request)
                for run in runs
                for number, request in enumerate(run.requests)
                if (number < self.workload.groups) is first and request.error is None
            )
            for first in (True, False)
        )
        return {
            "hit_rate": pooled.cached_tokens / pooled.input_tokens if pooled.input_tokens else 0.0,
            "possible_hit_rate": 0.0 if phase == "off" else self.workload.hit_rate(block_size, phase == "warm"),
            "ttft_first_of_group_s": _as_dict(firsts),
            "ttft_others_s": _as_dict(others),
            "best": dataclasses.asdict(metrics.compute([runs[metrics.best(runs)]], gpus)),
            "all_runs": dataclasses.asdict(pooled),
            "wall_spread": metrics.spread(runs),
        }

    def _table(self, phases: dict[str, dict[str, Any]]) -> None:
        head = ["caching", "hit rate", "possible", "TTFT ms P50", "P99", "first of group", "off/this P50", "P99"]
        rows = [[*head, "output tokens/s", "total tokens/s", "noise"]]
        off = phases["off"]["all_runs"]["ttft_s"]
        for name, phase in phases.items():
            ttft, first, best = phase["all_runs"]["ttft_s"], phase["ttft_first_of_group_s"], phase["best"]
            if not (off and ttft and first):
                rows.append([name, *["failed"] * (len(rows[0]) - 1)])
                continue
            rates = [f"{phase['hit_rate']:.1%}", f"{phase['possible_hit_rate']:.1%}"]
            times = [f"{seconds * MS:.2f}" for seconds in (ttft["p50"], ttft["p99"], first["p50"])]
            for percentile in ("p50", "p99"):
                ratio = phase[f"ttft_{percentile}_off_over_this"] = off[percentile] / ttft[percentile]
                times.append(f"{ratio:.2f}")
            speeds = [f"{best['output_tokens_per_s']:.1f}", f"{best['total_tokens_per_s']:.1f}"]
            noise = phase["wall_spread"]
            rows.append([name, *rates, *times, *speeds, "" if noise is None else f"{noise:.1%}"])
        self.report.table(rows)
        if any(phase["hit_rate"] < phase["possible_hit_rate"] - 1e-9 for phase in phases.values()):
            self.report.say(
                "note: fewer hits than possible: the cache forgot blocks, or requests began while their prefix was "
                "still being computed"
            )


def _as_dict(values: metrics.Distribution | None) -> dict[str, Any] | None:
    return None if values is None else dataclasses.asdict(values)


def main() -> int:
    parser = options.engine_parser(__doc__ or "", EXAMPLES)
    own = parser.add_argument_group("the requests")
    own.add_argument("--groups", type=options.positive, default=8, metavar="N", help="prefixes (default 8)")
    own.add_argument(
        "--group-size", type=options.positive, default=32, metavar="N", help="requests that share one (default 32)"
    )
    own.add_argument(
        "--prefix-len", type=options.positive, default=2048, metavar="N", help="tokens they share (default 2048)"
    )
    own.add_argument(
        "--tail-len", type=options.positive, default=64, metavar="N", help="prompt tokens of their own (default 64)"
    )
    own.add_argument("--output-len", type=options.positive, default=32, metavar="N", help="new tokens (default 32)")
    own.add_argument("--concurrency", type=options.positive, metavar="N", help="requests at once (default: all)")
    ns = parser.parse_args()
    return session.run(lambda scratch: Benchmark(ns, scratch))


if __name__ == "__main__":
    sys.exit(main())
