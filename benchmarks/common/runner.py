"""Drives an LLMEngine over a set of requests, and notes when each of them got its tokens."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


def run_engine(
    engine: LLMEngine,
    requests: Sequence[Request],
    kind: RequestOutputKind = RequestOutputKind.DELTA,
    after_step: Callable[[], None] | None = None,
) -> Run:
    """Add all requests at once and step until the last has ended: greedy, past the end-of-sequence token.

    DELTA notes every token; FINAL_ONLY only ends, at less cost. The prefix cache is emptied first.
    """
    if kind is RequestOutputKind.CUMULATIVE:
        raise ValueError("outputs must be DELTA or FINAL_ONLY, got CUMULATIVE")
    params = {m: SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for m in {m for _, m in requests}}
    traces = {str(i): Trace(len(prompt), m) for i, (prompt, m) in enumerate(requests)}
    engine.reset_prefix_cache()
    gc.collect()
    clock = time.perf_counter
    origin = clock()
    try:
        for (name, trace), (prompt, m) in zip(traces.items(), requests):
            trace.start = clock()
            engine.add_request(name, prompt, params[m], output_kind=kind)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = clock()
            for output in outputs:
                traces[output.request_id].take(output, now)
            if after_step is not None:
                after_step()
        wall = clock() - origin
    finally:
        engine.discard(traces)
    watched = kind is RequestOutputKind.DELTA
    sample = RunSample(wall, [trace.sample(origin, watched) for trace in traces.values()])
    return Run(sample, [trace.tokens for trace in traces.values()])
