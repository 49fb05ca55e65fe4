"""Long prompts beside decode: when they come, counted in engine steps, and what the decoding rows notice of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.metrics import Distribution, gaps, summarize
from common.runner import Driver, Run, Trace
from common.workloads import SEED, Workload
from rapid_infer.llm_engine import LLMEngine

EASE = 3
"""How many times the steps that the smallest chunk needs for a long prompt pass before the next one comes."""


@dataclass(frozen=True)
class Load:
    """`rows` decode; every `interval` steps one of `longs` long prompts comes. Lengths are tokens."""

    rows: int
    prompt: int
    longs: int
    long_prompt: int
    long_output: int
    settle: int
    interval: int | None = None


@dataclass(frozen=True)
class Setting:
    """Tokens of one step, and whether a prompt may be cut to fit them."""

    name: str
    budget: int
    chunked: bool

    def steps(self, load: Load) -> int:
        """At most so many compute one long prompt while all other rows decode."""
        return -(-load.long_prompt // (self.budget - load.rows - load.longs))

    def lead(self, load: Load) -> int:
        """At most so many pass until all rows decode."""
        room = self.budget - load.rows
        if self.chunked or room < load.prompt:
            return -(-load.rows * load.prompt // room) + 1
        return -(-load.rows // (room // load.prompt)) + 1


@dataclass(frozen=True)
class Course:
    """Steps of a run: until all rows decode, `settle` more, then `window`, in which a long prompt comes every
    `interval`. The same for all settings, so that each of them delivers the same tokens.
    """

    load: Load
    interval: int
    window: int
    output: int

    @classmethod
    def plan(cls, load: Load, settings: Sequence[Setting]) -> Course:
        slowest = max(setting.steps(load) for setting in settings)
        interval = load.interval or EASE * slowest
        window = max(load.longs * interval, (load.longs - 1) * interval + slowest, load.longs * slowest)
        # Two steps may be in flight at either end.
        lead = max(setting.lead(load) for setting in settings) + 4
        return cls(load, interval, window, lead + load.settle + window)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.load.prompt + self.output, self.load.long_prompt + self.load.long_output)


@dataclass
class Observed:
    """One run: seconds of single output tokens of the decoding rows.

    window   all of the window
    busy     those delivered by steps that computed a long prompt
    lasted   whether no row ended within the window
    """

    run: Run
    window: list[float]
    busy: list[float]
    lasted: bool


def observe(engine: LLMEngine, course: Course, *, beside: bool, label: str) -> Observed:
    """One run of `course`, without the long prompts unless they are to be `beside`."""
    load, vocab_size = course.load, engine.core.info.vocab_size
    rows = Workload(load.rows, (load.prompt,) * 2, (course.output,) * 2).requests(vocab_size)
    longs = Workload(load.longs, (load.long_prompt,) * 2, (load.long_output,) * 2).requests(vocab_size, SEED + 1)
    engine.reset_prefix_cache()
    with Driver(engine) as driver:
        traces = [driver.add(request) for request in rows]
        while not all(trace.deliveries or trace.error for trace in traces):
            driver.step()
        for _ in range(load.settle):
            driver.step()
        first = len(driver.times)
        added: list[tuple[int, Trace]] = []
        for step in range(course.window):
            if beside and step % course.interval == 0 and len(added) < load.longs:
                added.append((first + step, driver.add(longs[len(added)])))
            driver.step()
        lasted = not any(trace.end for trace in traces)
        while driver.unfinished:
            driver.step()
        run = driver.result(label)
    # What is in flight when a prompt comes was planned without it.
    late = engine.config.scheduler.queue_depth - 1
    busy = [(driver.times[step - 1 + late], trace.deliveries[0][0]) for step, trace in added if trace.deliveries]
    start, end = driver.times[first - 1], driver.times[first + course.window - 1]
    tokens = [(now, gap) for trace in traces for now, gap in _gaps(trace) if start < now <= end]
    within = [gap for now, gap in tokens if any(begin < now <= done for begin, done in busy)]
    return Observed(run, [gap for _, gap in tokens], within, lasted)


def _gaps(trace: Trace) -> Iterator[tuple[float, float]]:
    """(when it came, seconds since the one before) of each token but the first."""
    times = [now for now, count in trace.deliveries for _ in range(count)]
    return zip(times[1:], gaps(trace.deliveries))


def pooled(observed: Iterable[Observed], *, busy: bool = False) -> Distribution | None:
    """Output tokens of several runs together."""
    return summarize(gap for one in observed for gap in (one.busy if busy else one.window))
