"""Latency of one stream, or of a small fixed batch: time to the first token, and per token after it."""

from __future__ import annotations

import sys

from common import offline, options
from common.workloads import Workload

from rapid_infer.outputs import RequestOutputKind

EXAMPLES = """\
What it does: adds `--batch-size` requests of equal length at once, steps the engine until all have ended, and notes
the time of every token. The prompts are random token ids from a fixed seed; answers are greedy and exactly as long as
asked. Before each run the prefix cache is emptied, so every run computes its prompts.

Read the result so: TTFT is what a user waits for the first token, TPOT what each further token takes, ITL the single
gaps behind that mean. 1000 / TPOT ms is the speed of one stream in tokens per second. A difference smaller than the
noise it prints says nothing.

examples
  one stream, the demo model:
    python benchmarks/bench_latency.py --model demo --input-len 128 --output-len 128
  a batch of 8 beside transformers, two threads, result kept:
    python benchmarks/bench_latency.py --batch-size 8 --threads 2 --peer transformers --output results/b8.json
  fixed work that has a recorded peer number, random weights:
    python benchmarks/bench_latency.py --model qwen3-0.6b --workload latency-b1
  where the time goes:
    python benchmarks/bench_latency.py --output-len 32 --runs 1 --profile
"""


def main() -> int:
    parser = options.parser(__doc__ or "", EXAMPLES)
    own = parser.add_argument_group("without --workload")
    own.add_argument("--batch-size", type=options.positive, default=1, metavar="N", help="requests (default 1)")
    own.add_argument("--input-len", type=options.positive, default=128, metavar="N", help="prompt tokens (default 128)")
    own.add_argument("--output-len", type=options.positive, default=128, metavar="N", help="new tokens (default 128)")
    ns = parser.parse_args()
    workload = Workload(ns.batch_size, (ns.input_len, ns.input_len), (ns.output_len, ns.output_len))
    return offline.main("latency", ns, workload, RequestOutputKind.DELTA)


if __name__ == "__main__":
    sys.exit(main())
