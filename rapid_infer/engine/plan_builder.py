"""Collects what changes during one `schedule()` and turns it into a StepPlan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rapid_infer.engine.request import Request
from rapid_infer.engine.rows import Rows
from rapid_infer.engine.step_plan import NewBlocks, NewRows, SamplingFeatures, StepPlan

Ints = NDArray[np.int64]
_NONE = np.zeros(0, np.int32)


class PlanBuilder:
    def __init__(self, num_groups: int) -> None:
        self._new: list[tuple[int, int, Request]] = []
        self._blocks: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in range(num_groups)]

    def add_row(self, row: int, computed: int, request: Request) -> None:
        self._new.append((row, computed, request))

    def add_blocks(self, row: int, start: int, blocks: list[list[int]]) -> None:
        """The row's block table from column `start` on."""
        for (rows, columns, ids), mine in zip(self._blocks, blocks):
            n = len(mine) - start
            rows.extend([row] * n)
            columns.extend(range(start, len(mine)))
            ids.extend(mine[start:])

    def build(self, step: int, rows: Rows, order: Ints, start: Ints, grant: Ints, sampled: Ints) -> StepPlan:
        """`order`, `start`, `grant`: rows in batch order, their first new position and their number of tokens."""
        sampling = order[sampled]
        return StepPlan(
            step=step,
            rows=order.astype(np.int32),
            query_lens=grant.astype(np.int32),
            tokens=self._tokens(rows, order, start, grant),
            sampled=sampled.astype(np.int32),
            new_rows=self._new_rows(),
            new_blocks=tuple(NewBlocks(*(np.array(x, np.int32) for x in group)) for group in self._blocks),
            features=SamplingFeatures(
                random=not rows.greedy[sampling].all(), truncated=bool(rows.truncated[sampling].any())
            ),
            max_query_len=int(grant.max()),
            max_seq_len=int((start + grant).max()),
            num_tokens=int(grant.sum()),
        )

    def _tokens(self, rows: Rows, order: Ints, start: Ints, grant: Ints) -> NDArray[np.int32]:
        from_host = start < rows.initial[order]
        if not from_host.any():
            return _NONE
        tokens = np.full(int(grant.sum()), -1, np.int32)
        ends = np.cumsum(grant)
        for i in np.flatnonzero(from_host):
            request = rows.requests[order[i]]
            assert request is not None
            first, count = int(start[i]), int(grant[i])
            tokens[ends[i] - count : ends[i]] = request.tokens(first, first + count)
        return tokens

    def _new_rows(self) -> NewRows | None:
        if not self._new:
            return None
        params = [request.params for _, _, request in self._new]
        return NewRows(
            rows=np.array([row for row, _, _ in self._new], np.int32),
            computed=np.array([computed for _, computed, _ in self._new], np.int32),
            temperature=np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
            top_k=np.array([max(p.top_k, 0) for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            seed=np.array([request.seed for _, _, request in self._new], np.int64),
            sample_index=np.array([request.sample_index for _, _, request in self._new], np.int32),
        )
