"""Drives an LLMEngine over a set of requests, and notes when each of them got its tokens."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from common.metrics import gaps
from common.schema import RequestSample, RunSample
from common.workloads import Request
from rapid_infer.llm_engine import LLMEngine
from rapid_infer.outputs import RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams


@dataclass
class Run:
    """One timed run, and the tokens of each request, which are not part of a result."""

    sample: RunSample
    tokens: list[list[int]]


@dataclass
class Trace:
    """What is noted of one request while it runs: (time, tokens) of each delivery."""

    prompt_length: int
    wanted: int
    start: float = 0.0
    end: float = 0.0
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    error: str | None = None

    def take(self, output: RequestOutput, now: float) -> None:
        completion = output.outputs[0]
        if completion.token_ids:
            self.deliveries.append((now, len(completion.token_ids)))
            self.tokens += completion.token_ids
        if output.finished:
            self.end, self.cached = now, output.num_cached_tokens
            if completion.finish_reason != "length":
                self.error = completion.error or f"ended by {completion.finish_reason}"
            elif len(self.tokens) != self.wanted:
                self.error = f"{len(self.tokens)} tokens, expected {self.wanted}"

    def sample(self, origin: float, watched: bool) -> RequestSample:
        """`watched`: deliveries were seen one by one, so the first one is the first token."""
        first = self.deliveries[0][0] - origin if watched and self.deliveries else None
        itl = gaps(self.deliveries) if watched else []
        start, end = self.start - origin, self.end - origin
        return RequestSample(self.prompt_length, len(self.tokens), start, end, first, self.cached, itl, self.error)


class Driver:
    """Adds requests to an engine one by one, steps it, and notes when each got its tokens.

    A context, at whose end the engine is left without these requests, whatever happened. `times`: the clock after each
    step.
    """

    def __init__(self, engine: LLMEngine, kind: RequestOutputKind = RequestOutputKind.DELTA) -> None:
        if kind is RequestOutputKind.CUMULATIVE:
            raise ValueError("outputs must be DELTA or FINAL_ONLY, got CUMULATIVE")
        self.engine, self.kind = engine, kind
        self.traces: dict[str, Trace] = {}
        self.times: list[float] = []
        self._ended = 0
        gc.collect()
        self.origin = time.perf_counter()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.discard(self.traces)

    def add(self, request: Request) -> Trace:
        """Queue a request: greedy, past the end-of-sequence token."""
        prompt, wanted = request
        name = str(len(self.traces))
        trace = self.traces[name] = Trace(len(prompt), wanted, time.perf_counter())
        self.engine.add_request(name, prompt, _greedy(wanted), output_kind=self.kind)
        return trace

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.traces) - self._ended

    def step(self) -> None:
        outputs = self.engine.step()
        now = time.perf_counter()
        self.times.append(now)
        for output in outputs:
            self.traces[output.request_id].take(output, now)
            self._ended += output.finished

    def result(self, label: str | None = None) -> Run:
        """Once all have ended."""
        wall = time.perf_counter() - self.origin
        watched = self.kind is RequestOutputKind.DELTA
        traces = self.traces.values()
        return Run(
            RunSample(wall, [trace.sample(self.origin, watched) for trace in traces], label),
            [trace.tokens for trace in traces],
        )


@cache
def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def run_engine(
    engine: LLMEngine,
    requests: Sequence[Request],
    kind: RequestOutputKind = RequestOutputKind.DELTA,
    after_step: Callable[[], None] | None = None,
    *,
    concurrency: int | None = None,
    keep_cache: bool = False,
    label: str | None = None,
) -> Run:
    """Add all requests at once, or the next one whenever fewer than `concurrency` run; step until the last has ended.

    DELTA notes every token; FINAL_ONLY only ends, at less cost. The prefix cache is emptied first, or kept.
    """
    if not keep_cache:
        engine.reset_prefix_cache()
    waiting = deque(requests)
    with Driver(engine, kind) as driver:
        while waiting or driver.unfinished:
            while waiting and (concurrency is None or driver.unfinished < concurrency):
                driver.add(waiting.popleft())
            driver.step()
            if after_step is not None:
                after_step()
        return driver.result(label)
