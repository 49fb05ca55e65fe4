"""Offline throughput: all requests are there from the start, and the engine finishes them as fast as it can."""

from __future__ import annotations

import sys

from common import offline, options
from common.workloads import Workload

from rapid_infer.outputs import RequestOutputKind

EXAMPLES = """\
What it does: adds all requests at once and steps the engine until the last has ended, as `LLM.generate` does; the best
of `--runs` runs counts. The prompts are random token ids from a fixed seed; answers are greedy and exactly as long as
asked. Before each run the prefix cache is emptied, so only requests of the same run share prefixes.

Only the end of each request is observed, which costs the engine least; `--timestamps` notes every token as well and
adds TTFT, TPOT and ITL. With all requests at once TTFT is mostly waiting in the queue.

examples
  64 short requests, the demo model:
    python benchmarks/bench_offline_throughput.py --num-prompts 64 --input-len 128 --output-len 64
  mixed lengths, drawn evenly between two ends:
    python benchmarks/bench_offline_throughput.py --num-prompts 64 --input-len 32:256 --output-len 16:128
  fixed work that has a recorded peer number, random weights, result kept:
    python benchmarks/bench_offline_throughput.py --model qwen3-0.6b --workload mixed-256 --output results/mixed.json
  beside transformers in batches of 16 (a batch runs to its longest answer):
    python benchmarks/bench_offline_throughput.py --num-prompts 32 --peer transformers --peer-batch-size 16
"""


def main() -> int:
    parser = options.parser(__doc__ or "", EXAMPLES)
    own = parser.add_argument_group("without --workload")
    own.add_argument("--num-prompts", type=options.positive, default=32, metavar="N", help="requests (default 32)")
    own.add_argument(
        "--input-len", type=options.span, default=(128, 128), metavar="N|LOW:HIGH", help="prompt tokens (default 128)"
    )
    own.add_argument(
        "--output-len", type=options.span, default=(128, 128), metavar="N|LOW:HIGH", help="new tokens (default 128)"
    )
    own.add_argument(
        "--prefix-len",
        type=options.count,
        default=0,
        metavar="N",
        help="tokens that all prompts share (default 0)",
    )
    parser.add_argument("--timestamps", action="store_true", help="note every token, for TTFT, TPOT and ITL")
    ns = parser.parse_args()
    workload = Workload(ns.num_prompts, ns.input_len, ns.output_len, ns.prefix_len)
    kind = RequestOutputKind.DELTA if ns.timestamps else RequestOutputKind.FINAL_ONLY
    return offline.main("offline-throughput", ns, workload, kind)


if __name__ == "__main__":
    sys.exit(main())
