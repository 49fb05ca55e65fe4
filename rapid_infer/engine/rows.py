"""The scheduler's side of the running requests: one row each, counters as arrays, so that a steady step costs no loop
over rows.
"""

from __future__ import annotations

import heapq

import numpy as np

from rapid_infer.engine.request import Request

NOT_SHARED = 1 << 60


class Rows:
    """Struct of arrays over `max_num_seqs` rows; only rows handed out by `take` have meaning.

    known      tokens the sequence has, those still in flight included
    collected  tokens the host has seen
    computed   tokens whose forward has been planned; it catches up with `known`
    initial    tokens known when the row was taken: later ones are read from the device, not sent
    capacity   tokens that its blocks hold
    published  blocks whose content has been named (NOT_SHARED: never)
    limit      length at which the request ends; its last token is sampled but never computed
    epoch      how often the row was given back: a result for an older epoch is not for its present owner
    """

    def __init__(self, max_num_seqs: int) -> None:
        n = max_num_seqs
        (
            self.known,
            self.collected,
            self.computed,
            self.initial,
            self.capacity,
            self.published,
            self.limit,
            self.epoch,
        ) = (np.zeros(n, np.int64) for _ in range(8))
        self.greedy = np.zeros(n, bool)
        self.truncated = np.zeros(n, bool)
        self.stop = np.full((n, 1), -1, np.int64)
        self.requests: list[Request | None] = [None] * n
        self._free = list(range(n))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, computed: int, capacity: int, published: int) -> int:
        """Give `request` the lowest free row."""
        row = heapq.heappop(self._free)
        total = request.num_tokens
        self.known[row] = self.collected[row] = self.initial[row] = total
        self.computed[row] = computed
        self.capacity[row] = capacity
        self.published[row] = published
        self.limit[row] = request.limit
        params = request.params
        self.greedy[row] = params.greedy
        self.truncated[row] = not params.greedy and (params.top_k > 0 or params.top_p < 1)
        self._set_stop(row, request.stop_token_ids)
        self.requests[row] = request
        request.row = row
        return row

    def _set_stop(self, row: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stop.shape[1]:
            wider = np.full((len(self.stop), len(ids)), -1, np.int64)
            wider[:, : self.stop.shape[1]] = self.stop
            self.stop = wider
        self.stop[row] = -1
        self.stop[row, : len(ids)] = ids

    def give_back(self, row: int) -> None:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        self.requests[row] = None
        self.epoch[row] += 1
        request.row = -1
        heapq.heappush(self._free, row)
