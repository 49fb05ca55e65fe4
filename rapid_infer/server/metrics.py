"""Counts in memory that all front processes share, one row each, and their text for Prometheus.

Names are vLLM's where the meaning is. A row outlives its process, so nothing counted is lost with it.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)

REASONS = ("stop", "length", "abort", "error")
STATUSES = (200, 400, 401, 404, 405, 408, 413, 429, 499, 500, 503)


@dataclass(frozen=True)
class _Counter:
    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    kind: str = "counter"

    @property
    def size(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class _Histogram:
    name: str
    help: str
    bounds: tuple[float, ...]
    kind: str = "histogram"

    @property
    def size(self) -> int:
        """A count for each bound, one beyond the last, and the sum of all values."""
        return len(self.bounds) + 2


_ALL: tuple[_Counter | _Histogram, ...] = (
    _Counter("vllm:prompt_tokens_total", "Tokens of prompts."),
    _Counter("vllm:generation_tokens_total", "Tokens generated."),
    _Counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    _Counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    _Counter("vllm:request_success_total", "Completions that ended.", "finished_reason", REASONS),
    _Counter("rapid_infer:http_requests_total", "Answers.", "status", tuple(map(str, STATUSES))),
    _Histogram("vllm:time_to_first_token_seconds", "From arrival to the first token, of streams.", _SECONDS),
    _Histogram("vllm:inter_token_latency_seconds", "Between tokens of a stream, as the front sees them.", _GAPS),
    _Histogram("vllm:request_time_per_output_token_seconds", "Mean between tokens, per completed stream.", _GAPS),
    _Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _LONG),
    _Histogram("vllm:request_prompt_tokens", "Prompt tokens per prompt.", _TOKENS),
    _Histogram("vllm:request_generation_tokens", "Generated tokens per prompt.", _TOKENS),
    _Histogram("vllm:request_params_n", "The n of prompts.", _COUNTS),
    _Counter("rapid_infer:sequences_in_flight", "Completions that run or wait.", kind="gauge"),
)

_PLACES: dict[str, int] = {}
_ROW = 0
for _one in _ALL:
    _PLACES[_one.name] = _ROW
    _ROW += _one.size
_BOUNDS = {one.name: one.bounds for one in _ALL if isinstance(one, _Histogram)}

IN_FLIGHT = "rapid_infer:sequences_in_flight"


def row_bytes() -> int:
    """Of one front process."""
    return _ROW * 8


class Metrics:
    """`fd`: a file of `num_fronts * row_bytes()` bytes that all fronts map; None: this process counts alone."""

    def __init__(self, fd: int | None = None, num_fronts: int = 1, front: int = 0) -> None:
        self._memory = mmap.mmap(-1 if fd is None else fd, num_fronts * row_bytes())
        self._values = memoryview(self._memory).cast("d")
        self._num_fronts, self._base = num_fronts, front * _ROW

    def add(self, name: str, amount: float = 1, at: int = 0) -> None:
        """To value `at` of a counter or gauge."""
        self._values[self._base + _PLACES[name] + at] += amount

    def observe(self, name: str, value: float, times: int = 1) -> None:
        place, bounds = self._base + _PLACES[name], _BOUNDS[name]
        self._values[place + bisect_left(bounds, value)] += times
        self._values[place + len(bounds) + 1] += value * times

    def finished(self, reason: str) -> None:
        self.add("vllm:request_success_total", at=REASONS.index(reason))

    def answered(self, status: int) -> None:
        known = status if status in STATUSES else (500 if status >= 500 else 400)
        self.add("rapid_infer:http_requests_total", at=STATUSES.index(known))

    def total(self, name: str, at: int = 0) -> float:
        """Over all fronts."""
        place = _PLACES[name] + at
        return sum(self._values[front * _ROW + place] for front in range(self._num_fronts))

    def forget_in_flight(self) -> None:
        """For a front that has died."""
        self._values[self._base + _PLACES[IN_FLIGHT]] = 0

    def text(self, model: str, engine: dict[str, tuple[str, float]]) -> str:
        """In Prometheus's format; `engine` is what the engine knows, name -> (help, value)."""
        label = 'model_name="' + model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        lines: list[str] = []
        for one in _ALL:
            lines += [f"# HELP {one.name} {one.help}", f"# TYPE {one.name} {one.kind}"]
            lines += self._counter(one, label) if isinstance(one, _Counter) else self._histogram(one, label)
        for name, (text, value) in engine.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{{{label}}} {value:.17g}"]
        return "\n".join(lines) + "\n"

    def _counter(self, one: _Counter, label: str) -> Iterator[str]:
        for at, value in enumerate(one.values):
            more = f',{one.label}="{value}"' if one.label else ""
            yield f"{one.name}{{{label}{more}}} {self.total(one.name, at):.17g}"

    def _histogram(self, one: _Histogram, label: str) -> Iterator[str]:
        count = 0.0
        for at, bound in enumerate((*map(float, one.bounds), float("inf"))):
            count += self.total(one.name, at)
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{one.name}_bucket{{{label},le="{shown}"}} {count:.17g}'
        yield f"{one.name}_count{{{label}}} {count:.17g}"
        yield f"{one.name}_sum{{{label}}} {self.total(one.name, len(one.bounds) + 1):.17g}"
