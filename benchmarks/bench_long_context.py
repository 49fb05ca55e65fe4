"""Long prompts beside decode: what users whose answers are being written notice of them, with and without chunks."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from common import metrics, options, session
from common.long_context import Course, Load, Observed, Setting, observe, pooled
from common.metrics import Distribution
from common.monitor import Monitor
from common.output import MS
from common.schema import RunSample

from rapid_infer.errors import ConfigError
from rapid_infer.llm_engine import LLMEngine

EXAMPLES = """\
What it does: `--rows` requests decode. Once all of them do, a long prompt comes every `--interval` engine steps, and
the time of every token is noted. The same is run without the long prompts. Each setting has an engine of its own:
prompts computed whole ("off"), and in pieces that fit into steps of `--chunk` tokens. The course is counted in steps,
so it is the same every time, and every setting is judged by as many tokens. Prompts are random token ids from a fixed
seed; answers are greedy and exactly as long as asked.

Read the table so: the columns are of single output tokens of the decoding rows, `alone` without long prompts and
`beside` from the first of them until the window's end; `busy` only tokens of steps that computed a piece of one.
Jitter is P99 / P50: 1 is an even flow. A stall rarer than one token in a hundred is seen in the maximum only. TTFT is
of the long prompts; small chunks keep the flow even and let these wait longer: `vs off` says by how much.

examples
  random weights, result kept:
    python benchmarks/bench_long_context.py --model qwen3-8b --output results/long-8b.json
  two chunks, 8 prompts of 16384 tokens, one every 40 steps:
    python benchmarks/bench_long_context.py --model qwen3-8b --chunk 2048 --chunk 8192 --longs 8 --long-len 16384 \\
      --interval 40
  a CPU, the demo model, small:
    python benchmarks/bench_long_context.py --quick
"""

CHUNKS = (2048, 4096, 8192)
LONG_LEN = 32768
QUICK = {"rows": 4, "input_len": 32, "longs": 2, "long_len": 512, "long_output_len": 4, "chunk": [64, 128], "runs": 1}


class Benchmark(session.Session):
    def __init__(self, ns: argparse.Namespace, scratch: Path) -> None:
        super().__init__("long-context", ns, scratch)
        for name, why in (
            ("max_num_batched_tokens", "give --chunk instead"),
            ("enable_chunked_prefill", "both are measured"),
        ):
            session.refuse(self.kwargs, name, why)
        config = self.config()
        longest = config.model.max_model_len
        length = ns.long_len or min(LONG_LEN, longest - ns.long_output_len)
        session.check_length("a long prompt and its answer", length + ns.long_output_len, longest, "lower --long-len")
        self.load = Load(ns.rows, ns.input_len, ns.longs, length, ns.long_output_len, ns.settle, ns.interval)
        self.settings = self._settings(sorted(set(ns.chunk or CHUNKS)), config.scheduler.max_num_seqs)
        self.course = Course.plan(self.load, self.settings)
        remedy = "lower --input-len, --longs or --interval, or raise --chunk"
        what = f"a decoding row's prompt and the {self.course.output} tokens that it must last"
        session.check_length(what, self.course.longest, longest, remedy)
        self.kwargs.setdefault("max_model_len", self.course.longest)
        self.samples: list[RunSample] = []
        self.resolved: dict[str, Any] = {}
        self.model_dict: dict[str, Any] = {}

    def _settings(self, chunks: list[int], max_num_seqs: int) -> list[Setting]:
        load = self.load
        requests = load.rows + load.longs
        if max_num_seqs < requests:
            raise ConfigError(
                f"{load.rows} decoding rows and {load.longs} long prompts need --max-num-seqs {requests} or more, got "
                f"{max_num_seqs}"
            )
        if chunks[0] <= requests:
            raise ConfigError(
                f"--chunk {chunks[0]} leaves nothing to a long prompt beside {requests} other requests; use more"
            )
        # Room for the others' tokens: a prompt that has none beside them would wait until they have ended.
        whole = max(load.long_prompt, load.prompt) + requests
        return [Setting("off", whole, False), *(Setting(f"chunk {chunk}", chunk, True) for chunk in chunks)]

    def run(self) -> int:
        found = [self._measure(setting) for setting in self.settings]
        off = found[0]["long_ttft_s"]
        for figures in found:
            here = figures["long_ttft_s"]
            figures["long_ttft_over_off"] = here["p50"] / off["p50"] if here and off else None
        self._table(found)
        result = self.result(
            self.model_dict,
            {"resolved": self.resolved},
            {
                **dataclasses.asdict(self.course),
                "requests": "first the decoding rows, then the long prompts",
                "sampling": "greedy, end-of-sequence ignored",
                "prefix_cache": "emptied before each run",
            },
            self.samples,
            {"settings": found},
        )
        if self.ns.output:
            self.report.write(result, self.ns.output, self.ns.detail)
        return 1 if any(request.error for sample in self.samples for request in sample.requests) else 0

    def _measure(self, setting: Setting) -> dict[str, Any]:
        # Without chunks a step must hold the longest sequence that the engine takes.
        budget = setting.budget if setting.chunked else max(setting.budget, self.kwargs["max_model_len"])
        changes = {"enable_chunked_prefill": setting.chunked, "max_num_batched_tokens": budget}
        with self.open(**changes) as (engine, load_s):
            if not self.resolved:
                self.introduce(engine, load_s)
                self._introduce()
                self.model_dict = self.model_info(engine)
            self.resolved[setting.name] = session.resolved(engine.config)
            gpus = session.gpus_of(engine.config)
            for _ in range(self.ns.warmup):
                self._once(engine, setting)
            before = engine.core.scheduler.stats.preemptions
            runs = []
            with Monitor(gpus, sample=not self.ns.no_monitor) as monitor:
                for number in range(self.ns.runs):
                    runs.append(self._once(engine, setting))
                    alone, beside = (observed.run.sample.wall_s for observed in runs[-1])
                    self.report.say(f"{setting.name}, run {number + 1}: alone {alone:.4f} s, beside {beside:.4f} s")
            preemptions = engine.core.scheduler.stats.preemptions - before
        figures = self._figures(runs, gpus)
        self._notes(runs, preemptions)
        return {
            "name": setting.name,
            **changes,
            "load_s": load_s,
            **figures,
            "preemptions": preemptions,
            **dataclasses.asdict(monitor.resources),
        }

    def _introduce(self) -> None:
        load, course = self.load, self.course
        self.report.say(
            f"{load.rows} rows decode after prompts of {load.prompt} tokens, {course.output} tokens each; {load.longs} "
            f"prompts of {load.long_prompt} tokens, one every {course.interval} steps, in a window of {course.window} "
            f"steps; {self.ns.warmup} warm-up and {self.ns.runs} timed runs"
        )
        self.warn_of_other_work()

    def _once(self, engine: LLMEngine, setting: Setting) -> tuple[Observed, Observed]:
        alone = observe(engine, self.course, beside=False, label=f"{setting.name}, alone")
        return alone, observe(engine, self.course, beside=True, label=f"{setting.name}, beside")

    def _figures(self, runs: list[tuple[Observed, Observed]], gpus: int) -> dict[str, Any]:
        samples = [[observed.run.sample for observed in pair] for pair in zip(*runs)]
        self.samples += [*samples[0], *samples[1]]
        alone, beside = (pooled(pair) for pair in zip(*runs))
        busy = pooled((pair[1] for pair in runs), busy=True)
        longs = [request for sample in samples[1] for request in sample.requests[self.load.rows :]]
        ttft = metrics.summarize(metrics.ttft(request) for request in longs if request.error is None)
        return {
            "tpot_alone_s": _as_dict(alone),
            "tpot_beside_s": _as_dict(beside),
            "tpot_busy_s": _as_dict(busy),
            "jitter_alone": alone and alone.p99 / alone.p50,
            "jitter_beside": beside and beside.p99 / beside.p50,
            "long_ttft_s": _as_dict(ttft),
            "best": dataclasses.asdict(metrics.compute([samples[1][metrics.best(samples[1])]], gpus)),
            "wall_spread": metrics.spread(samples[1]),
        }

    def _notes(self, runs: list[tuple[Observed, Observed]], preemptions: int) -> None:
        self.say_errors([observed.run.sample for pair in runs for observed in pair])
        if preemptions:
            self.report.say(f"note: the cache was too small: {preemptions} times a request had to give up its place")
        if not all(observed.lasted for pair in runs for observed in pair):
            self.report.say("note: rows ended before the window did, so fewer tokens of this setting were compared")

    def _table(self, found: list[dict[str, Any]]) -> None:
        self.report.say("ms: single output tokens of the decoding rows, TTFT of the long prompts")
        head = ["prefill", "alone P50", "P99", "max", "jitter", "beside P50", "P95", "P99", "max", "jitter", "busy P50"]
        rows = [[*head, "TTFT P50", "max", "vs off", "total tokens/s", "noise"]]
        for one in found:
            alone, beside, busy, ttft = (
                one[name] for name in ("tpot_alone_s", "tpot_beside_s", "tpot_busy_s", "long_ttft_s")
            )
            if not (alone and beside and busy and one["long_ttft_over_off"]):
                rows.append([one["name"], *["failed"] * (len(rows[0]) - 1)])
                continue
            cells = [*_ms(alone, "p50", "p99", "max"), f"{one['jitter_alone']:.2f}"]
            cells += [*_ms(beside, "p50", "p95", "p99", "max"), f"{one['jitter_beside']:.2f}", *_ms(busy, "p50")]
            cells += [*_ms(ttft, "p50", "max"), f"{one['long_ttft_over_off'] - 1:+.1%}"]
            noise = one["wall_spread"]
            cells += [f"{one['best']['total_tokens_per_s']:.1f}", "" if noise is None else f"{noise:.1%}"]
            rows.append([one["name"], *cells])
        self.report.table(rows)


def _ms(values: dict[str, float], *names: str) -> list[str]:
    return [f"{values[name] * MS:.2f}" for name in names]


def _as_dict(values: Distribution | None) -> dict[str, Any] | None:
    return None if values is None else dataclasses.asdict(values)


def main() -> int:
    parser = options.engine_parser(__doc__ or "", EXAMPLES)
    own = parser.add_argument_group("the load")
    own.add_argument("--rows", type=options.positive, default=32, metavar="N", help="decoding requests (default 32)")
    own.add_argument(
        "--input-len", type=options.positive, default=512, metavar="N", help="their prompt tokens (default 512)"
    )
    own.add_argument("--longs", type=options.positive, default=4, metavar="N", help="long prompts (default 4)")
    own.add_argument(
        "--long-len",
        type=options.positive,
        metavar="N",
        help=f"their tokens (default {LONG_LEN}, or as many as the model takes)",
    )
    own.add_argument(
        "--long-output-len", type=options.positive, default=16, metavar="N", help="their new tokens (default 16)"
    )
    own.add_argument(
        "--interval",
        type=options.positive,
        metavar="STEPS",
        help="engine steps from one long prompt to the next (default: three times what the smallest chunk needs)",
    )
    own.add_argument(
        "--settle", type=options.count, default=16, metavar="STEPS", help="of decode before the window (default 16)"
    )
    own.add_argument(
        "--chunk",
        type=options.positive,
        action="append",
        metavar="TOKENS",
        help=f"tokens of one step with chunks, may be given again (default {', '.join(map(str, CHUNKS))})",
    )
    own.add_argument(
        "--quick",
        action="store_true",
        help="smaller defaults, for a CPU: {rows} rows of {input_len} tokens, {longs} prompts of {long_len}, "
        "chunks {chunk}, {runs} run".format(**QUICK),
    )
    ns = parser.parse_args()
    if ns.quick:
        parser.set_defaults(**QUICK)
        # Appended to a default list, what was given would not replace it.
        chunk, ns = ns.chunk, parser.parse_args()
        ns.chunk = chunk or QUICK["chunk"]
    return session.run(lambda scratch: Benchmark(ns, scratch))


if __name__ == "__main__":
    sys.exit(main())
