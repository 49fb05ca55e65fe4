"""How fast does an OpenAI-compatible server answer, as its clients see it?

Prompts are token ids to /v1/completions, streamed, greedy, past the end token. Definitions are vLLM's: TTFT from
sending a request to its first event, ITL between events, TPOT (E2E - TTFT) / (output tokens - 1).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import environment, metrics, options
from common.http_client import Client
from common.output import Report, command_line, figures
from common.schema import RequestSample, Result, RunSample
from common.workloads import Request, Workload, named, workload_names

EXAMPLES = """examples:
  python benchmarks/bench_serving.py --workload mixed-256                       all at once
  python benchmarks/bench_serving.py --input 128 --output 128 --requests 16 --concurrency 1
  python benchmarks/bench_serving.py --requests 200 --rate 10 --output-file r.json  Poisson arrivals, 10 a second
"""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="of the server, with /v1")
    p.add_argument("--model", help="default: the first that the server has")
    p.add_argument("--api-key", help="where the server wants one")
    p.add_argument("--workload", choices=workload_names(), help="fixed requests; else --requests, --input, --output")
    p.add_argument("--requests", type=options.positive, default=100, help="how many")
    p.add_argument("--input", type=options.span, default=(128, 128), metavar="N|LOW:HIGH", help="prompt tokens")
    p.add_argument("--output", type=options.span, default=(128, 128), metavar="N|LOW:HIGH", help="tokens to generate")
    p.add_argument("--vocab-size", type=options.positive, default=32000, help="token ids are below this")
    p.add_argument("--rate", type=float, help="requests a second, at random times (Poisson); default: all at once")
    p.add_argument("--concurrency", type=options.positive, help="requests in progress at most")
    p.add_argument("--repeats", type=options.positive, default=1, help="timed runs; prompts differ, lengths do not")
    p.add_argument("--warmup", type=options.count, default=1, help="requests before, one after another")
    p.add_argument("--output-file", type=Path, help="write the result here, and the log beside it")
    p.add_argument("--detail", action="store_true", help="with every gap between tokens")
    return p.parse_args()


class Load:
    """Requests, and the times at which they are sent."""

    def __init__(self, client: Client, model: str, ns: argparse.Namespace) -> None:
        self._client, self._model = client, model
        self._rate, self._limit = ns.rate, ns.concurrency

    async def run(self, requests: list[Request], seed: int) -> RunSample:
        gate = asyncio.Semaphore(self._limit or len(requests))
        began = time.perf_counter()
        tasks = []
        for request, at in zip(requests, self._times(len(requests), seed)):
            if (wait := began + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self._one(request, began, gate)))
        samples = await asyncio.gather(*tasks)
        return RunSample(time.perf_counter() - began, samples)

    def _times(self, count: int, seed: int) -> Iterator[float]:
        rng, at = random.Random(seed), 0.0
        for _ in range(count):
            yield at
            at += rng.expovariate(self._rate) if self._rate else 0.0

    async def _one(self, request: Request, began: float, gate: asyncio.Semaphore) -> RequestSample:
        prompt, length = request
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with gate:
            start = time.perf_counter()
            done = await self._client.stream("/completions", body)
            end = time.perf_counter()
        usage, arrivals = done.usage or {}, done.arrivals
        count = usage.get("completion_tokens", len(arrivals))
        error = done.error
        if error is None and count != length:
            error = f"{count} tokens instead of {length}"
        return RequestSample(
            input_tokens=usage.get("prompt_tokens", len(prompt)),
            output_tokens=count,
            start_s=start - began,
            end_s=end - began,
            first_token_s=arrivals[0] - began if arrivals else None,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            itl_s=metrics.gaps([(at, 1) for at in arrivals]),
            error=error,
        )


async def measure(ns: argparse.Namespace, report: Report) -> int:
    load_average = environment.load_average()
    client = Client(ns.base_url, ns.api_key)
    model = ns.model or (await client.get("/models"))["data"][0]["id"]
    workload = named(ns.workload) if ns.workload else Workload(ns.requests, ns.input, ns.output)
    load = Load(client, model, ns)
    for request in Workload(ns.warmup, (16, 16), (8, 8)).requests(ns.vocab_size, seed=1) if ns.warmup else ():
        await load.run([request], 0)
    runs = []
    for repeat in range(ns.repeats):
        runs.append(await load.run(workload.requests(ns.vocab_size, seed=7 + repeat), repeat))
        for sample in runs[-1].requests:
            if sample.error is not None:
                report.say(f"failed: {sample.error}")
                break
    best = metrics.compute([runs[metrics.best(runs)]])
    pooled = metrics.compute(runs)
    report.say(f"{model} at {ns.base_url}: {best.requests} requests, {pooled.errors} errors in {len(runs)} runs\n")
    report.table(figures(best, pooled))
    if ns.output_file is not None:
        setting = {**asdict(workload), "rate": ns.rate, "concurrency": ns.concurrency}
        result = Result(
            name="serving",
            environment=environment.collect(load_average),
            model={"name": model, "base_url": ns.base_url},
            engine_options={},
            command=command_line(),
            workload=setting,
            samples=runs,
            metrics={"best": asdict(best), "all": asdict(pooled), "spread": metrics.spread(runs)},
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        report.write(result, ns.output_file, ns.detail)
    return 1 if pooled.errors else 0


def main() -> int:
    ns = arguments()
    try:
        import uvloop

        run: Any = uvloop.run
    except ImportError:
        run = asyncio.run
    try:
        return run(measure(ns, Report()))
    except (OSError, ValueError) as error:
        print(f"error: {ns.base_url}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
