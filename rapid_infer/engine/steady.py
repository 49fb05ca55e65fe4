"""Planning while the same rows decode: what stays the same from step to step is computed once.

`Scheduler.schedule` gives the same plans without it, only slower; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rapid_infer.cache.manager import CacheManager
from rapid_infer.engine.launch import Launch
from rapid_infer.engine.rows import NOT_SHARED, Rows
from rapid_infer.engine.step_plan import NewBlocks, StepPlan

Ints = NDArray[np.int64]
_NONE = np.zeros(0, np.int32)


class SteadyBatch:
    """Rows that have all just run one token and sampled one. Valid until a row is taken or given back.

    Arrays stand in batch order: `computed` tokens of each row, the `capacity` of its blocks, and the length at which
    its next block is `full`. `steps_left`: until some row has sampled its last token.
    """

    def __init__(self, rows: Rows, cache: CacheManager, order: Ints) -> None:
        self._rows, self._cache, self._order = rows, cache, order
        self._version = rows.version
        self._batch_rows = order.astype(np.int32)
        self._ones = np.ones(len(order), np.int32)
        self._all = np.arange(len(order), dtype=np.int32)
        self._features = rows.features(order)
        self._requests = [rows.owner(row) for row in order.tolist()]
        self._ids = [request.request_id for request in self._requests]
        self._epochs = rows.epoch[order]
        self._computed = rows.computed[order]
        self._capacity = rows.capacity[order]
        blocks = np.minimum(rows.published[order] + 1, NOT_SHARED // cache.block_size)
        self._full = blocks * cache.block_size
        self._longest = int(self._computed.max())
        self._steps_left = int((rows.limit[order] - 1 - self._computed).min())
        self._no_blocks = tuple(NewBlocks(_NONE, _NONE, _NONE) for _ in cache.pools)

    @staticmethod
    def fits(plan: StepPlan, rows: Rows, order: Ints) -> bool:
        """Whether the rows of this plan, all of `order`, will go on as one."""
        one_each = plan.max_query_len == 1 and len(plan.sampled) == len(plan.rows) == len(order)
        return one_each and not rows.gated[order].any()

    def next(self, step: int, publish: Callable[[int, int], None]) -> Launch | None:
        """The next step, or None, with nothing changed, when it is not like the last: the scheduler must plan it.

        `publish(row, computed)` names the row's full blocks.
        """
        rows, order, size = self._rows, self._order, self._cache.block_size
        if self._version != rows.version or self._steps_left <= 0:
            return None
        computed = self._computed + 1
        short = np.flatnonzero(computed > self._capacity)
        if len(short) > self._cache.num_free:
            return None
        new_blocks = self._extend(short) if len(short) else self._no_blocks
        self._computed = computed
        self._longest += 1
        self._steps_left -= 1
        rows.computed[order] = computed
        rows.known[order] += 1
        for i in np.flatnonzero(np.minimum(computed, rows.collected[order]) >= self._full).tolist():
            row = int(order[i])
            publish(row, int(computed[i]))
            self._full[i] = (int(rows.published[row]) + 1) * size
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
            max_seq_len=self._longest,
            num_tokens=len(order),
            max_context_len=0,
        )
        return Launch(plan, self._requests, self._requests, self._ids, order, self._epochs)

    def _extend(self, short: Ints) -> tuple[NewBlocks, ...]:
        """One block of every group for each of these rows."""
        size, batch_rows = self._cache.block_size, self._batch_rows[short]
        columns = (self._capacity[short] // size).astype(np.int32)
        owners = [self._requests[i] for i in short.tolist()]
        added = []
        for group, pool in enumerate(self._cache.pools):
            blocks = pool.allocate(len(short))
            for request, block in zip(owners, blocks):
                request.blocks[group].append(block)
            added.append(NewBlocks(batch_rows, columns, np.array(blocks, np.int32)))
        self._capacity[short] += size
        self._rows.capacity[self._order[short]] = self._capacity[short]
        return tuple(added)
