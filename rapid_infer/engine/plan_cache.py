"""Planning while the same rows decode: what stays the same from step to step is computed once.

`Scheduler.schedule` does the same without it, only slower; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rapid_infer.cache.manager import CacheManager
from rapid_infer.engine.row_state import RowState
from rapid_infer.engine.scheduled_step import ScheduledStep
from rapid_infer.engine.step_plan import NewBlocks, StepPlan

Ints = NDArray[np.int64]
_NONE = np.zeros(0, np.int32)


class _BlockSchedule:
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


class PlanCache:
    """Rows that have all just run one token and sampled one. Lives until the scheduler plans a step without it.

    Holds arrays in batch order that steps share, and when each row needs a block; what changes is in `RowState`.
    """

    def __init__(self, rows: RowState, cache: CacheManager, order: Ints, trim: Callable[[int], None] | None) -> None:
        """`trim` gives back what a row no longer sees, where rows may."""
        self._rows, self._cache, self._order, self._trim = rows, cache, order, trim
        self._planned = 0
        self._batch_rows = order.astype(np.int32)
        self._ones, self._most = np.ones(len(order), np.int32), np.ones(len(order), np.int64)
        self._all = np.arange(len(order), dtype=np.int32)
        self._features = rows.features(order)
        self._requests = [rows.owner(row) for row in order.tolist()]
        self._ids = [request.request_id for request in self._requests]
        self._epochs, self._limits, self._stop_ids = rows.epoch[order], rows.limit[order], rows.stop_ids(order)
        computed = rows.computed[order]
        self._longest = int(computed.max())
        self._last_step = int((self._limits - rows.known[order]).min())
        everyone = np.arange(len(order))
        self._needs_block = _BlockSchedule(everyone, rows.capacity[order] - computed + 1, cache.block_size)
        self._no_blocks = tuple(NewBlocks(_NONE, _NONE, _NONE) for _ in range(cache.num_groups))

    @staticmethod
    def fits(plan: StepPlan, rows: RowState, cache: CacheManager, order: Ints) -> bool:
        """Whether the rows of this plan, all of `order`, will go on as one."""
        one_each = plan.max_query_len == 1 and len(plan.sampled) == len(plan.rows) == len(order)
        return one_each and not rows.gated[order].any() and not cache.has_checkpoints

    def next(self, step: int) -> ScheduledStep | None:
        """The next step, or None, with nothing changed, when it is not like the last: the scheduler must plan it."""
        # A row's last token is sampled, and never computed.
        if self._planned >= self._last_step:
            return None
        short = self._needs_block.at(self._planned + 1)
        new_blocks = self._no_blocks
        if len(short):
            if len(short) > self._cache.num_free_columns:
                return None
            new_blocks = self._extend(short, step)
        self._planned += 1
        self._rows.computed[self._order] += 1
        self._rows.known[self._order] += 1
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
        return ScheduledStep(
            plan,
            self._requests,
            self._requests,
            self._ids,
            self._order,
            self._epochs,
            self._most,
            self._limits,
            self._stop_ids,
        )

    def _extend(self, short: Ints, step: int) -> tuple[NewBlocks, ...]:
        """One block of every group for each of these rows."""
        batch_rows, size = self._batch_rows[short], self._cache.block_size
        columns = (self._rows.computed[self._order[short]] // size).astype(np.int32)
        owners = [self._requests[i] for i in short.tolist()]
        for request, column in zip(owners, columns.tolist()):
            if self._trim is not None:
                self._trim(request.row)
            self._cache.grow(request.blocks, (column + 1) * size, step)
        added = []
        for group in range(self._cache.num_groups):
            blocks = [request.blocks[group][-1] for request in owners]
            added.append(NewBlocks(batch_rows, columns, np.array(blocks, np.int32)))
        self._rows.capacity[self._order[short]] += size
        return tuple(added)
