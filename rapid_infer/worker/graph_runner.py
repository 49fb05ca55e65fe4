"""Records the step program as two CUDA graphs a step, `forward` and `sample`, and replays them.

Neither needs the host, and nothing in their keys or launches depends on a sequence's length. Decode steps, one token
for every row, are recorded by number of rows; mixed steps, which hold longer queries too, by number of tokens. Where
that is less work, there are graphs of a third kind for mixed steps in which no longer query has a context. All forwards
and the usual ways to sample are recorded at the start; other ways, when they are first asked for.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, product, takewhile
from typing import Any

import torch
from torch import nn

from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.engine.step_plan import StepPlan
from rapid_infer.layers.attention import CachedModule
from rapid_infer.layers.stack import distinct_layers
from rapid_infer.worker.graph_recorder import Recorder
from rapid_infer.worker.logprobs import Logprobs
from rapid_infer.worker.program import ForwardOutput, StepProgram, StepShape

logger = logging.getLogger(__name__)

GREEDY = SamplingFeatures()
USUAL = (GREEDY, SamplingFeatures(random=True), SamplingFeatures(random=True, truncated=True))
"""How tokens are chosen where nothing special is asked for: recorded at the start."""
DECODE, MIXED, MIXED_NO_CONTEXT = "decode", "mixed", "mixed_no_context"

Key = tuple[str, int, int]
"""(kind, rows or tokens of a forward graph, rows of a sample graph)"""


def row_buckets(limit: int) -> list[int]:
    """Numbers of rows, ascending: dense where a step costs little, in sixteens and then in 64s above."""
    return [*sorted({1, 2, 4, 8, *range(16, 256, 16), *range(256, limit, 64)} & set(range(1, limit))), limit]


def token_buckets(limit: int) -> list[int]:
    """Numbers of tokens, ascending: few, since each graph takes memory, but padding adds a fifth at most."""
    sizes = chain((16,), range(32, 256, 32), range(256, 512, 64), range(512, 1024, 128))
    larger = (size * step // 4 for size in (1 << n for n in range(10, 31)) for step in range(4, 8))
    return [*takewhile(lambda size: size < limit, chain(sizes, larger)), limit]


def splits_context(model: nn.Module) -> bool:
    """Whether mixed steps have two kinds of graphs, see `CachedModule.splits_context`."""
    return any(module.splits_context for module in model.modules() if isinstance(module, CachedModule))


def _fit(sizes: list[int]) -> list[int]:
    """For every n, at place n, the smallest size that holds it."""
    return list(chain.from_iterable([size] * (size - low) for low, size in zip([-1, *sizes], sizes)))


@dataclass
class LateGraphs:
    """Graphs that were recorded while requests waited, and the seconds that took the host."""

    count: int = 0
    seconds: float = 0.0


class GraphRunner:
    """Records and replays.

    recorded  graphs by kind
    replays   launches by kind of graph, "forward" and "sample"
    late      graphs that were recorded after `capture`
    """

    def __init__(self, program: StepProgram, recorder: Recorder, *, max_tokens: int, max_model_len: int) -> None:
        self.program, self.max_model_len = program, max_model_len
        self.max_rows = program.ring.layout.max_rows
        self.sizes, self.token_sizes = row_buckets(self.max_rows), token_buckets(max_tokens)
        self._row_bucket, self._token_bucket = _fit(self.sizes), _fit(self.token_sizes)
        self._splits_context = splits_context(program.model)
        self._mixed_output: ForwardOutput | None = None
        self._forward: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, ForwardOutput]] = {}
        self._sample: dict[Any, tuple[torch.cuda.CUDAGraph, Logprobs | None]] = {}
        self._recorder = recorder
        self._started = False
        self._warms_all_layers = False
        self.replays: Counter[str] = Counter()
        self.late = LateGraphs()

    @property
    def recorded(self) -> dict[str, int]:
        kinds = Counter(kind for kind, _ in self._forward)
        return {DECODE: kinds[DECODE], MIXED: kinds[MIXED] + kinds[MIXED_NO_CONTEXT], "sample": len(self._sample)}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of mixed steps."""
        return (MIXED, MIXED_NO_CONTEXT) if self._splits_context else (MIXED,)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every forward and the usual ways to sample, largest first: smaller ones fit into the same memory.

        Ways to sample come last: a decode step of one row took up to 4 % longer when some were recorded between
        mixed and decode steps. docs/performance/h200.md has the measurements; the cause is not known. No step may be
        in flight.
        """
        # What is run to warm up must move no row.
        self.program.ring.clear()
        for size, kind in product(reversed(self.token_sizes), self.kinds):
            self.capture_forward(kind, size)
        for size in reversed(self.sizes):
            self.capture_forward(DECODE, size)
        for size, kind, features in product(reversed(self.sizes), (DECODE, MIXED), USUAL):
            self.capture_sample(kind, size, features)
        self.program.ring.resync()
        self._started = True
        self._recorder.release_unused()

    def can_run(self, plan: StepPlan) -> bool:
        """Whether graphs can run this step."""
        return plan.prompt_logprobs is None and plan.num_tokens <= self.token_sizes[-1]

    def key_of(self, plan: StepPlan) -> Key:
        """Which graphs run a step. After both kinds of mixed forwards the same graphs sample."""
        if plan.is_decode:
            size = self._row_bucket[len(plan.rows)]
            return DECODE, size, size
        kind = MIXED_NO_CONTEXT if self._splits_context and plan.max_context_len == 0 else MIXED
        return kind, self._token_bucket[plan.num_tokens], self._row_bucket[max(len(plan.sampled), 1)]

    def launch_forward(self, key: Key) -> None:
        """Replay the first part of the step whose entry was written last."""
        self._forward[key[:2]][0].replay()
        self.replays["forward"] += 1

    def launch_sample(self, key: Key, features: SamplingFeatures) -> Logprobs | None:
        """Replay the second part; the result lies where the next replay writes its own."""
        kind, _, rows = key
        recorded = self._sample.get(self._sample_key(kind, rows, features))
        if recorded is None:
            recorded = self.capture_sample(kind, rows, features)
        recorded[0].replay()
        self.replays["sample"] += 1
        return recorded[1]

    def _sample_key(self, kind: str, size: int, features: SamplingFeatures) -> Any:
        kind = DECODE if kind == DECODE else MIXED
        if features.logprobs is not None:
            # A graph for every number of alternatives would be too many; the host takes what it needs.
            count = next((n for n in (0, 5, 20) if n >= features.logprobs), features.logprobs)
            features = replace(features, logprobs=count)
        return kind, size, features, self.program.device_rows.tokens.signature if features.processed else None

    def shape(self, kind: str, size: int) -> StepShape:
        """What a forward of this kind is recorded for: the largest step there can be in so many rows or tokens."""
        if kind == DECODE:
            return StepShape(True, size, size, size, 1, self.max_model_len, size, None)
        rows, context = self.max_rows, 0 if kind == MIXED_NO_CONTEXT else None
        return StepShape(False, rows, size, rows, size, self.max_model_len, None, context)

    def capture_forward(self, kind: str, size: int) -> None:
        """Record a forward of `size` rows, one token each, or of `size` tokens."""
        shape = self.shape(kind, size)

        def run() -> ForwardOutput:
            output = self.program.forward(shape)
            return output if shape.decode else self._keep_output(output)

        what = f"forward of {size} {'rows' if shape.decode else 'tokens'}"
        self._forward[kind, size] = self._record_forward(what, run)

    def _record_forward(
        self, what: str, run: Callable[[], ForwardOutput]
    ) -> tuple[torch.cuda.CUDAGraph, ForwardOutput]:
        """Warmed up with one layer of each kind; with all of a model that hides from us how its layers differ."""
        if self._warms_all_layers:
            return self._recorder.record(what, run)
        left_out = False

        def warm_up() -> None:
            nonlocal left_out
            with distinct_layers(self.program.model) as fewer:
                run()
            left_out = fewer

        try:
            return self._recorder.record(what, run, warm_up)
        except RuntimeError as error:
            if not left_out:
                raise
            first = error
        logger.warning("%s; trying once more, with all layers run before", first)
        try:
            recorded = self._recorder.record(what, run)
        except RuntimeError as second:
            cause = second.__cause__ or second
            raise RuntimeError(
                f"{first}; once all layers had run it failed with {type(cause).__name__}: {cause}"
            ) from first
        self._warms_all_layers = True
        return recorded

    def _keep_output(self, output: ForwardOutput) -> ForwardOutput:
        """In the same buffers for all mixed forwards, so that one sample graph serves all of them."""
        if self._mixed_output is None:
            tensors = (output.hidden, output.rows, output.lengths)
            self._mixed_output = ForwardOutput(*map(torch.empty_like, tensors))
        shared = self._mixed_output
        shared.hidden.copy_(output.hidden)
        shared.rows.copy_(output.rows)
        shared.lengths.copy_(output.lengths)
        return shared

    def capture_sample(
        self, kind: str, size: int, features: SamplingFeatures
    ) -> tuple[torch.cuda.CUDAGraph, Logprobs | None]:
        """Record how tokens are sampled after a forward of this kind for up to `size` rows."""
        key = self._sample_key(kind, size, features)
        features = key[2]
        if kind == DECODE:
            output = self._forward[kind, size][1]
        else:
            assert self._mixed_output is not None
            output = self._mixed_output.first_rows(size)

        def run() -> Logprobs | None:
            return self.program.sample(output, features)

        def sample_only() -> object:
            return self.program.sample_tokens(output, features)

        # At the start all entries are empty; later a commit that is not recorded would move real rows.
        warm_up = sample_only if self._started else run
        began = time.perf_counter()
        recorded = self._recorder.record(f"sampling of {size} rows with {features}", run, warm_up)
        if self._started:
            self.late.count += 1
            self.late.seconds += time.perf_counter() - began
        self._sample[key] = recorded
        return recorded
