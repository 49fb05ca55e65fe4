"""Planning while the same rows decode: what stays the same from step to step is computed once.

`Scheduler.schedule` and `results.apply` do the same without it, only slower; a test holds the two together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rapid_infer.cache.manager import CacheManager
from rapid_infer.engine.launch import Launch
from rapid_infer.engine.rows import Rows
from rapid_infer.engine.step_plan import NewBlocks, StepPlan, StepResult

Ints = NDArray[np.int64]
_NONE = np.zeros(0, np.int32)
_LOGGED = 1024
"""Steps whose tokens are kept in one array before the requests get them."""


class _Turns:
    """Whose turn it is, where place i of `places` comes at `first[i]` and then every `period` steps."""

    def __init__(self, places: Ints, first: Ints, period: int) -> None:
        phase = first % period
        by_phase = np.argsort(phase, kind="stable")
        self._places, self._first, self._period = places[by_phase], first[by_phase], period
        self._starts = np.searchsorted(phase[by_phase], np.arange(period + 1)).tolist()
        self._all_from = int(first.max(initial=0))

    def at(self, step: int) -> Ints:
        """Ascending."""
        phase = step % self._period
        turn = slice(self._starts[phase], self._starts[phase + 1])
        places = self._places[turn]
        return places if step >= self._all_from or not len(places) else places[self._first[turn] <= step]


class SteadyBatch:
    """Rows that have all just run one token and sampled one. Lives until the scheduler plans a step without it.

    Counts in `Rows`, and the requests' tokens, stand still meanwhile: `settle` brings them up to date. Arrays stand in
    batch order, and hold what was so when the batch began; since then `_planned` steps have been planned, and the
    results of `_taken` of them are here. A row's known tokens are its computed ones and the one just sampled.
    """

    def __init__(self, rows: Rows, cache: CacheManager, order: Ints, step: int) -> None:
        self._rows, self._cache, self._order, self._since = rows, cache, order, step
        self._planned = self._taken = 0
        self._batch_rows = order.astype(np.int32)
        self._ones = np.ones(len(order), np.int32)
        self._all = np.arange(len(order), dtype=np.int32)
        self._features = rows.features(order)
        self._requests = [rows.owner(row) for row in order.tolist()]
        self._ids = [request.request_id for request in self._requests]
        self._epochs = rows.epoch[order]
        self._computed = rows.computed[order]
        self._known = rows.known[order]
        self._longest = int(self._computed.max())
        self._last_step = int((rows.limit[order] - self._known).min())
        stop = rows.stop[order]
        self._stop = stop if (stop >= 0).any() else None
        everyone = np.arange(len(order))
        self._needs_block = _Turns(everyone, rows.capacity[order] - self._computed + 1, cache.block_size)
        self._no_blocks = tuple(NewBlocks(_NONE, _NONE, _NONE) for _ in range(cache.num_groups))
        self._log = np.empty((_LOGGED, len(order)), np.int32)
        self._logged = 0

    @staticmethod
    def fits(plan: StepPlan, rows: Rows, cache: CacheManager, order: Ints) -> bool:
        """Whether the rows of this plan, all of `order`, will go on as one."""
        one_each = plan.max_query_len == 1 and len(plan.sampled) == len(plan.rows) == len(order)
        return one_each and not rows.gated[order].any() and not cache.trims and not cache.has_checkpoints

    def planned(self, launch: Launch) -> bool:
        return launch.plan.step > self._since

    def next(self, step: int) -> Launch | None:
        """The next step, or None, with nothing changed, when it is not like the last: the scheduler must plan it."""
        # A row's last token is sampled, and never computed.
        if self._planned >= self._last_step:
            return None
        short = self._needs_block.at(self._planned + 1)
        if len(short) > self._cache.num_free_columns:
            return None
        new_blocks = self._extend(short, step) if len(short) else self._no_blocks
        self._planned += 1
        plan = StepPlan(
            step=step,
            rows=self._batch_rows,
            query_lens=self._ones,
            tokens=_NONE,
            sampled=self._all,
            new_rows=None,
            new_blocks=new_blocks,
            features=self._features,
            max_query_len=1,
            max_seq_len=self._longest + self._planned,
            num_tokens=len(self._order),
            max_context_len=0,
        )
        return Launch(plan, self._requests, self._requests, self._ids, self._order, self._epochs)

    def take(self, result: StepResult) -> list[int] | None:
        """The tokens of a planned step's result; None, with nothing changed, when some row ends with it."""
        tokens = result.token_ids
        stopped = self._stop is not None and (self._stop == tokens[:, None]).any()
        if stopped or self._taken + 1 >= self._last_step or result.failed.any():
            return None
        self._log[self._logged] = tokens
        self._logged += 1
        self._taken += 1
        if self._logged == _LOGGED:
            self._hand_over()
        return tokens.tolist()

    def settle(self) -> None:
        """Bring rows and requests up to date."""
        rows, order = self._rows, self._order
        rows.computed[order] = self._computed + self._planned
        rows.known[order] = self._known + self._planned
        if self._taken:
            rows.collected[order] = self._known + self._taken
        self._hand_over()

    def _hand_over(self) -> None:
        for request, tokens in zip(self._requests, self._log[: self._logged].T.tolist()):
            request.output_token_ids += tokens
        self._logged = 0

    def _extend(self, short: Ints, step: int) -> tuple[NewBlocks, ...]:
        """One block of every group for each of these rows."""
        batch_rows = self._batch_rows[short]
        columns = ((self._computed[short] + self._planned) // self._cache.block_size).astype(np.int32)
        owners = [self._requests[i] for i in short.tolist()]
        for request, column in zip(owners, columns.tolist()):
            self._cache.grow(request.blocks, (column + 1) * self._cache.block_size, step)
        added = []
        for group in range(self._cache.num_groups):
            blocks = [request.blocks[group][-1] for request in owners]
            added.append(NewBlocks(batch_rows, columns, np.array(blocks, np.int32)))
        self._rows.capacity[self._order[short]] += self._cache.block_size
        return tuple(added)
