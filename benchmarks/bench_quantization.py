"""Formats of weights beside each other: speed, time to the first token, memory, and which operators ran."""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

from common import metrics, options, session, workloads
from common.monitor import Monitor
from common.output import gigabytes
from common.perplexity import perplexity
from common.runner import run_engine
from common.schema import RunSample

from rapid_infer.errors import RapidInferError
from rapid_infer.llm_engine import LLMEngine
from rapid_infer.outputs import RequestOutputKind

PLAIN = "none"
EXAMPLES = """\
What it does: starts an engine for each format of `--schemes` (`none`: the weights as the checkpoint has them; others
are values of the engine's option `quantization`), runs the fixed work of `--workloads` on it one after another, and
prints a line for each pair. A format that the model or the machine cannot have is refused in that line, with the
reason, and the next one runs.

Read the result so: `peak` is what torch had allocated at most, of which the cache is a part; `start` is the time to
load and start. The operators are those that the engine called for matrices, with the provider that ran.

examples
  all formats of the 8B shape, random weights:
    python benchmarks/bench_quantization.py --model qwen3-8b
  one of them on a real checkpoint, result kept:
    python benchmarks/bench_quantization.py --model ./Qwen3-8B --schemes none,fp8_row --output results/fp8.json
  what rounding costs in perplexity, on any machine:
    python benchmarks/bench_quantization.py --model demo --workloads latency-b1 --perplexity 2000
"""


def main() -> int:
    parser = options.engine_parser(__doc__ or "", EXAMPLES)
    own = parser.add_argument_group("what is compared")
    names = "none,fp8,fp8_row,fp8_block,nvfp4,mxfp4"
    own.add_argument("--schemes", default=names, metavar="LIST", help=f"formats, with commas (default {names})")
    kinds = "of the KV cache, with commas; each is run with each format (default auto)"
    own.add_argument("--kv-cache-dtypes", default="auto", metavar="LIST", help=f"types {kinds}")
    work = "latency-b1,latency-b32,prefill-8k,mixed-256"
    own.add_argument(
        "--perplexity", type=options.count, default=0, metavar="N",
        help="of the first N tokens of Python's help topics; needs the model's own weights (default: none)",
    )  # fmt: skip
    own.add_argument("--workloads", default=work, metavar="LIST", help=f"fixed work, with commas (default {work})")
    ns = parser.parse_args()
    return session.run(lambda scratch: _Benchmark("quantization", ns, scratch))


class _Benchmark(session.Session):
    def __init__(self, name: str, ns: argparse.Namespace, scratch: Path) -> None:
        super().__init__(name, ns, scratch)
        session.refuse(self.kwargs, "quantization", "name formats with --schemes")
        session.refuse(self.kwargs, "kv_cache_dtype", "name types with --kv-cache-dtypes")
        self.workloads = {work: workloads.named(work) for work in ns.workloads.split(",")}
        self.rows = [["format, work", "tokens/s", "wall s", "TTFT ms", "peak", "perplexity", "start s"]]
        self.found: list[RunSample] = []
        self.metrics: dict[str, object] = {}

    def run(self) -> int:
        model, failed = None, False
        for weights, kv in product(self.ns.schemes.split(","), self.ns.kv_cache_dtypes.split(",")):
            scheme = weights if kv == "auto" else f"{weights} + {kv} KV"
            chosen: dict[str, Any] = {"kv_cache_dtype": kv}
            chosen |= {} if weights == PLAIN else {"quantization": weights}
            chosen |= {"skip_tokenizer_init": False} if self.ns.perplexity else {}
            try:
                with self.open(**chosen) as (engine, load_s):
                    model = self.model_info(engine)
                    failed |= self._scheme(engine, scheme, load_s)
            except RapidInferError as error:
                self.report.say(f"{scheme}: refused: {error}")
                self.metrics[scheme] = {"refused": str(error)}
        self.report.say()
        self.report.table(self.rows)
        if self.ns.output and model is not None:
            work = {"name": self.ns.workloads, "schemes": self.ns.schemes, "kv_cache_dtypes": self.ns.kv_cache_dtypes}
            self.report.write(self.result(model, {}, work, self.found, self.metrics), self.ns.output, self.ns.detail)
        return 1 if failed or model is None else 0

    def _scheme(self, engine: LLMEngine, scheme: str, load_s: float) -> bool:
        """Whether a request failed."""
        self.introduce(engine, load_s)
        failed, gpus = False, session.gpus_of(engine.config)
        tokens = self.ns.perplexity
        lost = perplexity(engine, tokens, min(512, engine.core.info.max_model_len - 1)) if tokens else None
        for name, workload in self.workloads.items():
            requests = workload.requests(engine.core.info.vocab_size)
            for _ in range(self.ns.warmup):
                run_engine(engine, requests, RequestOutputKind.DELTA)
            with Monitor(gpus, sample=False) as monitor:
                runs = [run_engine(engine, requests, RequestOutputKind.DELTA).sample for _ in range(self.ns.runs)]
            self.say_errors(runs)
            best = metrics.compute([runs[metrics.best(runs)]], gpus)
            failed |= best.errors > 0
            peak = monitor.resources.peak_gpu_allocated_bytes if gpus else monitor.resources.peak_rss_bytes
            first = "" if best.ttft_s is None else f"{1e3 * best.ttft_s.p50:.1f}"
            row = [f"{scheme}, {name}", f"{best.output_tokens_per_s:.1f}", f"{best.wall_s:.3f}", first]
            shown = "" if lost is None else f"{lost:.3f}"
            self.rows.append([*row, gigabytes(peak), shown, f"{load_s:.1f}"])
            self.report.say("  ".join(self.rows[-1]))
            for run in runs:
                run.label = f"{scheme}, {name}"
            self.found += runs
            self.metrics[f"{scheme}, {name}"] = {
                "wall_s": best.wall_s, "output_tokens_per_s": best.output_tokens_per_s, "peak_bytes": peak,
                "load_s": load_s, "perplexity": lost,
            }  # fmt: skip
        counts = engine.executor.built.ops.counts()
        kinds = ("linear", "experts", "dequantize", "lm_head")
        self.report.say("operators: " + ", ".join(op for op, n in counts.items() if n and any(k in op for k in kinds)))
        return failed


if __name__ == "__main__":
    sys.exit(main())
