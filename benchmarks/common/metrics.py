"""Times of requests become the figures that people compare; benchmarks/README.md defines each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from common.schema import RequestSample, RunSample


@dataclass(frozen=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    count: int


@dataclass(frozen=True)
class RunMetrics:
    """Figures of one run, or of several together. Times are seconds; None: not observed or not defined.

    tgs   output tokens per second and GPU; None without a GPU
    """

    requests: int
    errors: int
    error_rate: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    tgs: float | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None


def ttft(request: RequestSample) -> float | None:
    """From adding the request to its first token, queueing included."""
    return None if request.first_token_s is None else request.first_token_s - request.start_s


def e2e(request: RequestSample) -> float:
    """From adding the request to its end."""
    return request.end_s - request.start_s


def tpot(request: RequestSample) -> float | None:
    """Mean time of a token after the first; None for a request of one token."""
    first = ttft(request)
    if first is None or request.output_tokens < 2:
        return None
    return (e2e(request) - first) / (request.output_tokens - 1)


def gaps(deliveries: Sequence[tuple[float, int]]) -> list[float]:
    """ITL: the gap before each token but the first, from (time, tokens) of each delivery.

    Tokens that come together share their gap evenly; those that come with the first one add no gap.
    """
    found: list[float] = []
    for (before, _), (now, count) in pairwise(deliveries):
        found += [(now - before) / count] * count
    return found


def summarize(values: Iterable[float | None]) -> Distribution | None:
    """None when no value is known. Percentiles are interpolated linearly."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(known):
        return None
    percentiles = np.percentile(known, [50, 90, 95, 99]).tolist()
    return Distribution(float(known.mean()), *percentiles, float(known.min()), float(known.max()), len(known))


def compute(runs: Sequence[RunSample], gpus: int = 0) -> RunMetrics:
    """Figures of these runs pooled; failed requests count as errors and in nothing else but `wall_s`."""
    everything = [request for run in runs for request in run.requests]
    good = [request for request in everything if request.error is None]
    wall = sum(run.wall_s for run in runs)
    inputs = sum(request.input_tokens for request in good)
    outputs = sum(request.output_tokens for request in good)
    errors = len(everything) - len(good)
    return RunMetrics(
        requests=len(everything),
        errors=errors,
        error_rate=errors / len(everything) if everything else 0.0,
        input_tokens=inputs,
        cached_tokens=sum(request.cached_tokens for request in good),
        output_tokens=outputs,
        wall_s=wall,
        output_tokens_per_s=outputs / wall,
        total_tokens_per_s=(inputs + outputs) / wall,
        requests_per_s=len(good) / wall,
        tgs=outputs / wall / gpus if gpus else None,
        ttft_s=summarize(map(ttft, good)),
        tpot_s=summarize(map(tpot, good)),
        itl_s=summarize(gap for request in good for gap in request.itl_s),
        e2e_s=summarize(map(e2e, good)),
    )


def best(runs: Sequence[RunSample]) -> int:
    """The run with the fewest errors, of those the fastest."""
    return min(range(len(runs)), key=lambda i: (sum(r.error is not None for r in runs[i].requests), runs[i].wall_s))


def spread(runs: Sequence[RunSample]) -> float | None:
    """The noise band: (slowest - fastest) / median of the runs' times. A difference within it says nothing.

    None for a single run.
    """
    if len(runs) < 2:
        return None
    walls = [run.wall_s for run in runs]
    return (max(walls) - min(walls)) / float(np.median(walls))
