"""A device made of arrays: it runs StepPlans with a toy model and checks what a real device would write and read.

Every slot holds the (token, position) that was written there. A row's next token is a function of all tokens read
through its block table, so a wrong block, a stale prefix or an early reuse changes the tokens or fails a check.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rapid_infer.cache.spec import CacheGroup, FullKV
from rapid_infer.engine.executor import ModelInfo
from rapid_infer.engine.request import Request
from rapid_infer.engine.step_plan import RowMasks, StepPlan, StepResult

VOCAB = 50
GARBAGE = -7
SPEC = FullKV(1, 8, "float32")

Owner = tuple[int, int]
"""A row and how many requests it has had."""


def next_token(history: Sequence[int]) -> int:
    """The toy model."""
    return zlib.crc32(np.asarray(history, np.int32).tobytes()) % VOCAB


def undisturbed(request: Request) -> list[int]:
    """The output of `request` if it ran alone and nothing failed."""
    tokens = request.prompt_token_ids.tolist()
    while len(tokens) < request.limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


@dataclass(eq=False)
class Launched:
    """A step on its way. `true_tokens`: per row, what the host knew of its owner at launch."""

    plan: StepPlan
    true_tokens: list[list[int]]
    owners: list[Owner]
    reads: dict[int, set[Owner]] = field(default_factory=dict)
    broken: bool = False
    result: StepResult | None = None


@dataclass
class Failures:
    """Decides what goes wrong, by step number."""

    launch: Callable[[int], bool] = lambda step: False
    collect: Callable[[int], bool] = lambda step: False
    finish: Callable[[int], bool] = lambda step: False
    rows: Callable[[StepPlan], np.ndarray] = lambda plan: np.zeros(len(plan.sampled), bool)


class FakeExecutor:
    """Follows `rapid_infer.engine.executor.Executor`. A step runs as late as it may: when it is collected."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        budget: int,
        groups: Sequence[CacheGroup] = (CacheGroup(SPEC, 1),),
        failures: Failures | None = None,
    ) -> None:
        self.info = ModelInfo("Fake", VOCAB, max_model_len, groups, num_blocks, block_size, "float32")
        self.budget = budget
        self.failures = failures or Failures()
        self.owner_of: Callable[[int], Request | None] = lambda row: None
        self.is_healthy = True
        self.violation: AssertionError | None = None
        self.plans: list[StepPlan] = []
        self.unfinished: Launched | None = None
        self.launches_at_collect: list[tuple[int, int]] = []
        self._size = block_size
        self._generation = np.zeros(max_num_seqs, np.int64)
        self._queue: list[Launched] = []
        columns = -(-max_model_len // block_size)
        # What the host has said, as of the last launch; the device's copy lags behind it.
        self._named = [np.zeros((max_num_seqs, columns), np.int64) for _ in groups]
        self._planned = np.zeros(max_num_seqs, np.int64)
        self._table = [table.copy() for table in self._named]
        self._length = np.zeros(max_num_seqs, np.int64)
        self._last = np.zeros(max_num_seqs, np.int64)
        self._token = [np.full(num_blocks * block_size, GARBAGE) for _ in groups]
        self._position = [np.full(num_blocks * block_size, GARBAGE) for _ in groups]

    def healthy(self) -> bool:
        for step in self._queue:
            step.result = step.result or self._run(step, step.broken)
        return self.is_healthy

    def late_graphs(self) -> tuple[int, float]:
        return 0, 0.0

    def close(self) -> None:
        pass

    @property
    def _in_flight(self) -> list[Launched]:
        return [step for step in self._queue if not step.broken and step.result is None]

    def launch(self, plan: StepPlan) -> Launched:
        with self._noting_violations():
            return self._launch(plan)

    def launch_forward(self, plan: StepPlan) -> Launched:
        handle = self.launch(plan)
        self.unfinished = handle
        return handle

    def launch_finish(self, handle: Launched, masks: RowMasks | None) -> None:
        with self._noting_violations():
            assert handle is self.unfinished, "not the step just begun"
            assert self._in_flight == [handle], "a mask may follow the tokens of a step that was not collected"
        self.unfinished = None
        if self.failures.finish(handle.plan.step):
            handle.broken = True
            raise RuntimeError(f"finish of step {handle.plan.step}")

    def collect(self, handle: Launched) -> StepResult:
        with self._noting_violations():
            return self._collect(handle)

    @contextmanager
    def _noting_violations(self) -> Iterator[None]:
        """The engine takes whatever is raised here for a failed forward, so the test has to look for itself."""
        try:
            yield
        except AssertionError as error:
            self.violation = self.violation or error
            raise

    def _launch(self, plan: StepPlan) -> Launched:
        self._check_plan(plan)
        self._apply(plan, self._named, self._planned)
        if plan.new_rows is not None:
            self._generation[plan.new_rows.rows] += 1
        owners = [(int(row), int(self._generation[row])) for row in plan.rows]
        requests = [self.owner_of(int(row)) for row in plan.rows]
        known = [[] if r is None else r.tokens(0, r.num_tokens).tolist() for r in requests]
        step = Launched(plan, known, owners)
        self._check_blocks(step)
        self._planned[plan.rows] += plan.query_lens
        self.plans.append(plan)
        if self.failures.launch(plan.step):
            step.broken = True
            self._queue.append(step)
            raise RuntimeError(f"launch of step {plan.step}")
        self._queue.append(step)
        return step

    def _collect(self, handle: Launched) -> StepResult:
        assert handle in self._queue, "a step behind a failed one was not dropped"
        self.launches_at_collect.append((handle.plan.step, self.plans[-1].step))
        failing = self.failures.collect(handle.plan.step)
        # A failed step takes those behind it along; one whose launch failed has no handle and may have left anything.
        end = len(self._queue) if failing else self._queue.index(handle) + 1
        done, self._queue = self._queue[:end], self._queue[end:]
        dropped = (step.broken or step.result is not None for step in done[:-1])
        assert all(dropped) or failing, "not the oldest step"
        result = None
        for step in done:
            result = step.result or self._run(step, step.broken or failing)
        if failing:
            raise RuntimeError(f"collect of step {handle.plan.step}")
        assert result is not None
        return result

    def _check_plan(self, plan: StepPlan) -> None:
        assert not self.plans or plan.step > self.plans[-1].step
        rows, lens = plan.rows, plan.query_lens
        assert len(rows) == len(lens) == len(set(rows.tolist())) > 0
        assert lens.min() >= 1
        assert lens.sum() == plan.num_tokens <= self.budget
        assert lens.max() == plan.max_query_len
        assert not np.any((lens[1:] == 1) & (lens[:-1] > 1)), "a single-token row stands behind a longer one"
        assert np.all(np.diff(plan.sampled) > 0)
        assert not len(plan.sampled) or 0 <= plan.sampled[0] <= plan.sampled[-1] < len(rows)
        assert len(plan.tokens) in (0, plan.num_tokens)
        assert len(plan.new_blocks) == len(self._named)

    def _check_blocks(self, step: Launched) -> None:
        """Tables are complete; what a row writes, no other row writes now or reads in a step that may still run."""
        plan = step.plan
        writes: dict[int, Owner] = {}
        in_flight = self._in_flight
        for i, row in enumerate(plan.rows):
            start, stop = int(self._planned[row]), int(self._planned[row] + plan.query_lens[i])
            assert stop <= self.info.max_model_len
            assert stop <= plan.max_seq_len
            assert plan.query_lens[i] == 1 or plan.max_context_len is None or start <= plan.max_context_len
            columns = -(-stop // self._size)
            for group, table in enumerate(self._named):
                blocks = table[row, :columns]
                assert blocks.all(), f"row {row} lacks a block"
                assert len(set(blocks.tolist())) == columns
                for column, block in enumerate(blocks.tolist()):
                    key = block * len(self._named) + group
                    step.reads.setdefault(key, set()).add(step.owners[i])
                    if (column + 1) * self._size > start:
                        assert writes.setdefault(key, step.owners[i]) == step.owners[i], (
                            f"block {block} has two writers"
                        )
                        for other in in_flight:
                            assert other.reads.get(key, set()) <= {step.owners[i]}, f"block {block} is still in use"

    @staticmethod
    def _apply(plan: StepPlan, tables: Sequence[np.ndarray], length: np.ndarray) -> None:
        if plan.new_rows is not None:
            length[plan.new_rows.rows] = plan.new_rows.computed
            for table in tables:
                table[plan.new_rows.rows] = 0
        for table, new in zip(tables, plan.new_blocks):
            assert np.all(new.blocks > 0), "block 0 is padding"
            assert np.all(new.blocks < 1 << 20)
            table[new.rows, new.columns] = new.blocks

    def _run(self, step: Launched, broken: bool) -> StepResult:
        plan = step.plan
        self._apply(plan, self._table, self._length)
        starts = np.cumsum(plan.query_lens) - plan.query_lens
        # All rows write before any row reads, as in a layer: a row may share a block that another fills in this step.
        for row, first, count in zip(plan.rows, starts, plan.query_lens):
            self._write(plan, int(row), int(first), int(count), broken)
        tokens = np.zeros(len(plan.sampled), np.int32)
        if not broken:
            histories = [self._read(step, i) for i in range(len(plan.rows))]
            tokens[:] = [next_token(histories[i]) for i in plan.sampled]
        failed = self.failures.rows(plan)
        tokens[failed] = 0
        self._last[plan.rows[plan.sampled]] = tokens
        return StepResult(tokens, failed)

    def _write(self, plan: StepPlan, row: int, first: int, count: int, broken: bool) -> None:
        start = int(self._length[row])
        if len(plan.tokens) and plan.tokens[first] >= 0:
            tokens = plan.tokens[first : first + count]
            assert tokens.min() >= 0
        else:
            assert count == 1, "only the last token of a row is on the device"
            tokens = self._last[row : row + 1]
        position = np.arange(start, start + count)
        for table, token_at, position_at in zip(self._table, self._token, self._position):
            slots = table[row, position // self._size] * self._size + position % self._size
            token_at[slots], position_at[slots] = (GARBAGE, GARBAGE) if broken else (tokens, position)
        self._length[row] = start + count

    def _read(self, step: Launched, i: int) -> np.ndarray:
        row, known = int(step.plan.rows[i]), step.true_tokens[i]
        position = np.arange(self._length[row])
        histories = []
        for table, token_at, position_at in zip(self._table, self._token, self._position):
            slots = table[row, position // self._size] * self._size + position % self._size
            assert np.array_equal(position_at[slots], position), f"row {row} reads positions {position_at[slots]}"
            histories.append(token_at[slots])
        history = histories[0]
        assert all(np.array_equal(history, other) for other in histories)
        n = min(len(known), len(history))
        assert history[:n].tolist() == known[:n], f"row {row} reads tokens that are not its own"
        return history
