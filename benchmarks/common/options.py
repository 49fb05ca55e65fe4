"""Command-line options that the benchmarks share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import workloads

Span = tuple[int, int]
ENGINE_OPTIONS = (
    "dtype",
    "device",
    "num_threads",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
)


def parser(description: str, examples: str) -> argparse.ArgumentParser:
    """For one engine on one set of requests: with peers, fixed requests and a profile."""
    p = engine_parser(description, examples)
    p.add_argument(
        "--workload",
        choices=workloads.workload_names(),
        help="fixed requests by name, the same for every engine; replaces the lengths and counts given here",
    )
    compare = p.add_argument_group("comparison and profile")
    compare.add_argument(
        "--peer",
        choices=["transformers"],
        help="then time transformers' generate on the same requests, dtype and threads, and print the ratio",
    )
    compare.add_argument(
        "--peer-batch-size", type=positive, metavar="N", help="requests in one batch of the peer (default: all of them)"
    )
    compare.add_argument(
        "--profile",
        nargs="?",
        type=Path,
        const=Path("profiles"),
        metavar="DIR",
        help="then one extra run under torch's profiler: prints the 25 most expensive ops and writes a Chrome trace "
        "with the engine's own spans into DIR (default ./profiles; open it in chrome://tracing or ui.perfetto.dev)",
    )
    compare.add_argument(
        "--profile-steps", type=positive, default=32, metavar="N", help="engine steps in the trace (default 32)"
    )
    return p


def engine_parser(description: str, examples: str) -> argparse.ArgumentParser:
    """With what every benchmark of the engine has; a benchmark adds what is its own."""
    p = argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(workloads.model_names())
    work = p.add_argument_group("the work")
    work.add_argument(
        "--model",
        default="demo",
        metavar="M",
        help=f"demo, a directory, or random weights in the shape of {names}",
    )
    work.add_argument("--runs", type=positive, default=3, metavar="N", help="timed runs (default 3)")
    work.add_argument("--warmup", type=count, default=1, metavar="N", help="untimed runs before them (default 1)")
    work.add_argument(
        "--uniform-routing",
        action="store_true",
        help="experts by a uniform random draw instead of the router, as the recorded peers had it",
    )

    add_engine_options(p)

    out = p.add_argument_group("the result")
    out.add_argument("--output", type=Path, metavar="FILE.json", help="write the result here, and FILE.log beside it")
    out.add_argument("--detail", action="store_true", help="keep the gap before every single token in the result")
    out.add_argument("--no-monitor", action="store_true", help="do not run nvidia-smi beside the timed runs")
    return p


def add_engine_options(p: argparse.ArgumentParser) -> None:
    """What `engine_kwargs` reads."""
    engine = p.add_argument_group("the engine")
    engine.add_argument("--dtype", help="bfloat16, float16, float32; default: the checkpoint's, if the CPU is fast")
    engine.add_argument("--device", help="auto, cpu or cuda")
    engine.add_argument(
        "--threads", dest="num_threads", type=positive, metavar="N", help="CPU threads (default: one per physical core)"
    )
    engine.add_argument("--load-format", choices=["auto", "dummy"], help="dummy: random weights, no files needed")
    engine.add_argument("--max-model-len", type=positive, metavar="N", help="longest prompt and answer together")
    engine.add_argument("--max-num-seqs", type=positive, metavar="N", help="requests that run at once")
    engine.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help="tokens of one step")
    engine.add_argument("--kv-cache-memory-bytes", type=positive, metavar="N", help="size of the cache")
    engine.add_argument(
        "--engine",
        action="append",
        default=[],
        type=setting,
        metavar="NAME=VALUE",
        help="any other engine option of docs/options.md, such as enforce_eager=true; may be given again",
    )


def engine_kwargs(ns: argparse.Namespace) -> dict[str, Any]:
    """The engine's keyword arguments: only what was given, so that the engine's own defaults hold."""
    given = {name: getattr(ns, name) for name in ENGINE_OPTIONS if getattr(ns, name) is not None}
    return given | dict(ns.engine)


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is JSON if it can be, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return name.replace("-", "_"), value


def span(text: str) -> Span:
    """A length (128), or two ends to draw from evenly (100:1024)."""
    try:
        low, _, high = text.partition(":")
        ends = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a length or LOW:HIGH, got {text!r}") from None
    if not 1 <= ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"expected 1 <= LOW <= HIGH, got {text!r}")
    return ends


def positive(text: str) -> int:
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError("expected an integer >= 1")
    return value


def count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text!r}")
    return value
