"""A device made of arrays: it runs StepPlans with a toy model and checks what a real device would write and read.

Every slot holds the (token, position) that was written there, and each row's own tokens are kept beside it. What a row
reads through its block tables, as far as each group sees, is compared with them, so a wrong block, a stale prefix or an
early reuse fails a check.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rapid_infer.cache.block_pool import BlockPool
from rapid_infer.cache.groups import GroupPolicy, StatePolicy, WindowPolicy
from rapid_infer.cache.pools import shared_pools
from rapid_infer.cache.spec import CacheGroup, CacheSpec, FullKV
from rapid_infer.engine.executor import ModelInfo
from rapid_infer.engine.request import Request
from rapid_infer.engine.step_plan import RowMasks, StepPlan, StepResult

VOCAB = 50
GARBAGE = -7
SPEC = FullKV(1, 8, "float32")


@dataclass(frozen=True)
class ToyKV(FullKV):
    """Sees `window` tokens, and nothing beyond, so that blocks go back as early as they may."""

    def policy(self, block_size: int) -> GroupPolicy:
        return super().policy(block_size) if self.window is None else WindowPolicy(block_size, self.window)


@dataclass(frozen=True)
class ToyState(CacheSpec):
    """What a recurrent layer keeps of a sequence: one number for all tokens so far."""

    every: int = 1
    dtype = "float32"
    bytes_per_token = 0

    def page_bytes(self, block_size: int) -> int:
        return 4

    def layout(self, layers: int, blocks: int, block_size: int) -> tuple[int, ...]:
        return layers, blocks

    def policy(self, block_size: int) -> GroupPolicy:
        return StatePolicy(block_size, self.every)


Owner = tuple[int, int]
"""A row and how many requests it has had."""


def next_token(history: Sequence[int]) -> int:
    """The toy model."""
    return zlib.crc32(np.asarray(history, np.int32).tobytes()) % VOCAB


def next_state(state: int, tokens: Sequence[int]) -> int:
    """The toy recurrence."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), state)


def undisturbed(request: Request) -> list[int]:
    """The output of `request` if it ran alone and nothing failed."""
    tokens = request.prompt_token_ids.tolist()
    while len(tokens) < request.limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


def _guesses(plan: StepPlan) -> np.ndarray:
    return np.zeros(len(plan.rows), np.int64) if plan.drafts is None else plan.drafts.astype(np.int64)


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
    sample: Callable[[int], bool] = lambda step: False
    rows: Callable[[StepPlan], np.ndarray] = lambda plan: np.zeros(len(plan.sampled), bool)


class FakeExecutor:
    """Follows `rapid_infer.engine.executor.Executor`. A step runs as late as it may: when it is collected."""

    def __init__(
        self,
        *,
        num_blocks: int | Sequence[int],
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        budget: int,
        groups: Sequence[CacheGroup] = (CacheGroup(SPEC, 1),),
        failures: Failures | None = None,
        drafts: int = 0,
    ) -> None:
        pools = shared_pools(groups)
        counts = [num_blocks] * len(pools) if isinstance(num_blocks, int) else num_blocks
        self.info = ModelInfo("Fake", VOCAB, max_model_len, groups, counts, block_size, "float32", drafts)
        self.budget = budget
        self.failures = failures or Failures()
        self.owner_of: Callable[[int], Request | None] = lambda row: None
        self.pool_of: Callable[[int], BlockPool | None] = lambda group: None
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
        # With guesses in flight, a row is between these two.
        self._planned, self._least = (np.zeros(max_num_seqs, np.int64) for _ in range(2))
        self._table = [table.copy() for table in self._named]
        self._length = np.zeros(max_num_seqs, np.int64)
        self._last = np.zeros(max_num_seqs, np.int64)
        self._policies = [group.spec.policy(block_size) for group in groups]
        pool_of = {g: number for number, pool in enumerate(pools) for g in pool.groups}
        self._pool = [pool_of[g] for g in range(len(groups))]
        # The tokens that each row has computed, or took over.
        self._fed: list[list[int]] = [[] for _ in range(max_num_seqs)]
        # Groups of one pool write to one tensor.
        shape = [n * block_size for n in counts]
        token, position = ([np.full(n, GARBAGE) for n in shape] for _ in range(2))
        self._token, self._position = ([arrays[number] for number in self._pool] for arrays in (token, position))
        # Of states: the number, at a block's own place, and beside it how many tokens it stands for.

    def healthy(self) -> bool:
        for step in self._queue:
            step.result = step.result or self._run(step, step.broken)
        return self.is_healthy

    def on_failure(self, call: Callable[..., object]) -> None:
        self.call_on_failure = call

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

    def launch_sample(self, handle: Launched, masks: RowMasks | None) -> None:
        with self._noting_violations():
            assert handle is self.unfinished, "not the step just begun"
            assert self._in_flight == [handle], "a mask may follow the tokens of a step that was not collected"
        self.unfinished = None
        if self.failures.sample(handle.plan.step):
            handle.broken = True
            raise RuntimeError(f"sampling of step {handle.plan.step}")

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
            self._least[plan.new_rows.rows] = plan.new_rows.computed
        if plan.new_rows is not None:
            self._generation[plan.new_rows.rows] += 1
        owners = [(int(row), int(self._generation[row])) for row in plan.rows]
        requests = [self.owner_of(int(row)) for row in plan.rows]
        known = [[] if r is None else r.tokens(0, r.num_tokens).tolist() for r in requests]
        step = Launched(plan, known, owners)
        self._check_blocks(step)
        self._planned[plan.rows] += plan.query_lens
        self._least[plan.rows] += plan.query_lens - _guesses(plan)
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
        for i, count in zip(handle.plan.sampled, result.counts):
            row, generation = handle.owners[i]
            if self._generation[row] == generation:
                guesses = int(_guesses(handle.plan)[i])
                self._planned[row] -= guesses + 1 - count if guesses else 0
                self._least[row] += count - 1
        return result

    def _check_plan(self, plan: StepPlan) -> None:
        assert not self.plans or plan.step > self.plans[-1].step
        rows, lens = plan.rows, plan.query_lens
        assert len(rows) == len(lens) == len(set(rows.tolist())) > 0
        assert lens.min() >= 1
        guesses = _guesses(plan)
        assert 0 <= guesses.min() <= guesses.max() <= self.info.num_drafts
        assert np.all(guesses < lens)
        assert set(np.flatnonzero(guesses)) <= set(plan.sampled.tolist())
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
            start, stop = int(self._least[row]), int(self._planned[row] + plan.query_lens[i])
            assert stop <= self.info.max_model_len
            assert stop <= plan.max_seq_len
            assert plan.query_lens[i] == 1 or plan.max_context_len is None or start <= plan.max_context_len
            for group, table in enumerate(self._named):
                reads, writes_to = self._touched(group, start, stop)
                columns = sorted({*reads, *writes_to})
                blocks = dict(zip(columns, table[row, columns].tolist()))
                assert all(blocks.values()), f"row {row} lacks a block"
                if not self._is_state(group):
                    assert len(set(blocks.values())) == len(columns)
                for column, block in blocks.items():
                    key = block * len(self._named) + self._pool[group]
                    step.reads.setdefault(key, set()).add(step.owners[i])
                    if column in writes_to:
                        owner = writes.setdefault(key, step.owners[i])
                        assert owner == step.owners[i], f"block {block} has two writers"
                        for other in in_flight:
                            assert other.reads.get(key, set()) <= {step.owners[i]}, f"block {block} is still in use"
                        self._check_state_write(group, block)
        for key, owner in writes.items():
            if self._is_state_key(key):
                assert step.reads[key] <= {owner}, "a state is read by one row and written by another"

    def _is_state(self, group: int) -> bool:
        return isinstance(self._policies[group], StatePolicy)

    def _is_state_key(self, key: int) -> bool:
        return any(self._is_state(g) for g, pool in enumerate(self._pool) if pool == key % len(self._named))

    def _touched(self, group: int, start: int, stop: int) -> tuple[range, range]:
        """The columns that a row's step of these positions reads, and those that it writes."""
        policy, size = self._policies[group], self._size
        if isinstance(policy, StatePolicy):
            read, written = (start - 1) // size, (stop - 1) // size
            return range(read, read + 1) if start else range(0), range(written, written + 1)
        return range(self._sees_from(group, start) // size, -(-stop // size)), range(start // size, -(-stop // size))

    def _sees_from(self, group: int, position: int) -> int:
        policy = self._policies[group]
        return max(position - policy.window + 1, 0) if isinstance(policy, WindowPolicy) else 0

    def _check_state_write(self, group: int, block: int) -> None:
        pool = self.pool_of(group)
        if self._is_state(group) and pool is not None:
            assert pool.is_private(block), f"a step writes to block {block}, which others may read"

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
        if plan.new_rows is not None:
            known = dict(zip(plan.rows.tolist(), step.true_tokens))
            for row, computed in zip(plan.new_rows.rows.tolist(), plan.new_rows.computed.tolist()):
                self._fed[row] = known[row][:computed]
        starts = np.cumsum(plan.query_lens) - plan.query_lens
        # All rows write before any row reads, as in a layer: a row may share a block that another fills in this step.
        before = {row: int(self._length[row]) for row in plan.rows.tolist()}
        for row, first, count in zip(plan.rows, starts, plan.query_lens):
            self._write(plan, int(row), int(first), int(count), broken)
        # What stands behind a row's count may look like tokens.
        shape = len(plan.sampled), 1 + self.info.num_drafts
        tokens = (np.arange(np.prod(shape), dtype=np.int32).reshape(shape) * 7 + plan.step) % VOCAB
        counts = np.ones(len(plan.sampled), np.int32)
        tokens[:, 0] = 0
        if not broken:
            for i, row in enumerate(plan.rows.tolist()):
                self._check_read(step, i, before[row])
            for n, i in enumerate(plan.sampled.tolist()):
                found = self._verify(int(plan.rows[i]), int(_guesses(plan)[i]))
                tokens[n, : len(found)], counts[n] = found, len(found)
        failed = self.failures.rows(plan)
        tokens[failed], counts[failed] = 0, 1
        self._last[plan.rows[plan.sampled]] = tokens[np.arange(len(tokens)), counts - 1]
        return StepResult(tokens, failed, counts=counts)

    def _guess(self, row: int, count: int) -> list[int]:
        """What may follow the row's last token: mostly the truth."""
        history = [*self._fed[row], int(self._last[row])]
        for _ in range(count):
            token = next_token(history)
            history.append((token + (zlib.crc32(bytes(history[-2:])) % 3 == 0)) % VOCAB)
        return history[len(history) - count :]

    def _verify(self, row: int, guesses: int) -> list[int]:
        """The tokens that follow what the row has computed, up to its first wrong guess, which is taken back."""
        fed = self._fed[row]
        certain = len(fed) - guesses
        found = [next_token(fed[:certain])]
        while certain < len(fed) and fed[certain] == found[-1]:
            certain += 1
            found.append(next_token(fed[:certain]))
        del fed[certain:]
        self._length[row] = certain
        return found

    def _write(self, plan: StepPlan, row: int, first: int, count: int, broken: bool) -> None:
        start = int(self._length[row])
        if len(plan.tokens) and plan.tokens[first] >= 0:
            tokens = plan.tokens[first : first + count]
            assert tokens.min() >= 0
            assert not _guesses(plan)[plan.rows.tolist().index(row)], "nothing to guess from is on the device yet"
        else:
            guesses = int(_guesses(plan)[plan.rows.tolist().index(row)])
            assert count == 1 + guesses, "only the last token of a row, and what it makes of it, are on the device"
            tokens = np.array([self._last[row], *self._guess(row, guesses)])
        assert len(self._fed[row]) == start
        self._fed[row] += tokens.tolist()
        position = np.arange(start, start + count)
        for group, (table, token_at, position_at) in enumerate(zip(self._table, self._token, self._position)):
            if self._is_state(group):
                self._write_state(group, row, start, tokens, broken)
                continue
            slots = table[row, position // self._size] * self._size + position % self._size
            token_at[slots], position_at[slots] = (GARBAGE, GARBAGE) if broken else (tokens, position)
        self._length[row] = start + count

    def _write_state(self, group: int, row: int, start: int, tokens: np.ndarray, broken: bool) -> None:
        table, state_at, count_at = self._table[group][row], self._token[group], self._position[group]
        state = 0
        if start and not broken:
            slot = table[(start - 1) // self._size] * self._size
            assert count_at[slot] == start, f"row {row} at {start} reads a state after {count_at[slot]} tokens"
            state = int(state_at[slot])
        stop = start + len(tokens)
        slot = table[(stop - 1) // self._size] * self._size
        state_at[slot] = GARBAGE if broken else next_state(state, tokens)
        count_at[slot] = GARBAGE if broken else stop

    def _check_read(self, step: Launched, i: int, start: int) -> None:
        """Every group shows the row's own tokens as far as it sees."""
        row, known = int(step.plan.rows[i]), step.true_tokens[i]
        stop = int(self._length[row])
        history = np.array(self._fed[row], np.int64)
        n = min(len(known), stop)
        assert history[:n].tolist() == known[:n], f"row {row} computes tokens that are not its own"
        for group, (table, token_at, position_at) in enumerate(zip(self._table, self._token, self._position)):
            if self._is_state(group):
                slot = table[row, (stop - 1) // self._size] * self._size
                assert (position_at[slot], token_at[slot]) == (stop, next_state(0, history)), (
                    f"row {row} has a wrong state"
                )
                continue
            position = np.arange(self._sees_from(group, start), stop)
            slots = table[row, position // self._size] * self._size + position % self._size
            assert np.array_equal(position_at[slots], position), f"row {row} reads positions {position_at[slots]}"
            assert np.array_equal(token_at[slots], history[position]), f"row {row} reads tokens that are not its own"
