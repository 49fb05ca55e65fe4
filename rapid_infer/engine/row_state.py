"""The scheduler's side of the running requests: one row each, counters as arrays, so that a steady step costs no loop
over rows.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from rapid_infer.engine.request import Request
from rapid_infer.engine.row_fields import SamplingFeatures, feature_bits
from rapid_infer.engine.step_plan import I32

Ints = NDArray[np.int64]
NOT_SHARED = 1 << 60

_FEW_STOPS = 8
"""Columns of `RowState.stop` that stay when nobody needs them any more."""


class RowState:
    """Struct of arrays over `max_num_seqs` rows; only assigned rows have meaning.

    known      tokens the sequence has, those still in flight included, as if every guess of the device were right
    collected  tokens the host has seen
    tokens     `[rows, max_model_len]` those of them that came while the row was held, by their place in the sequence
    computed   tokens whose forward has been planned, likewise; it catches up with `known`
    initial    tokens known when the row was taken: later ones are read from the device, not sent
    capacity   tokens that its blocks hold
    cached     blocks that others can find (NOT_SHARED: never)
    limit      length at which the request ends; its last token is sampled but never computed
    epoch      how often the row was given back: a result for an older epoch is not for its present owner
    stop       `[rows, most of any request]` ids that end the request, -1 where unused
    flags      what sampling must do for the row, see `feature_bits`
    logprobs, prompt_logprobs   how many alternatives to report; -1: none at all
    drafts     whether the device may guess its next tokens
    gated      its next token's mask is made when the host has seen the last one
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        n = max_num_seqs
        # The system gives memory to the part alone that is written to.
        self.tokens = np.empty((n, max_model_len), np.int32)
        (
            self.known,
            self.collected,
            self.computed,
            self.initial,
            self.capacity,
            self.cached,
            self.limit,
            self.epoch,
        ) = (np.zeros(n, np.int64) for _ in range(8))
        self.flags = np.zeros(n, np.int32)
        self.logprobs, self.prompt_logprobs = (np.full(n, -1, np.int32) for _ in range(2))
        self.gated, self.drafts = np.zeros(n, bool), np.zeros(n, bool)
        self.stop = np.full((n, 1), -1, np.int64)
        self.requests: list[Request | None] = [None] * n
        self._free = list(range(n))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign_row(self, request: Request, computed: int, capacity: int, cached: int) -> int:
        """Give `request` the lowest free row."""
        row = heapq.heappop(self._free)
        total = request.num_tokens
        self.known[row] = self.collected[row] = self.initial[row] = total
        self.computed[row] = computed
        self.capacity[row] = capacity
        self.cached[row] = cached
        self.limit[row] = request.limit
        params = request.params
        self.flags[row] = feature_bits(request)
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.gated[row] = request.mask is not None and request.mask.changes
        # Masks and log-probabilities are one to a step.
        self.drafts[row] = not self.gated[row] and params.logprobs is None
        self._set_stop(row, request.stop_token_ids)
        self.requests[row] = request
        request.rows, request.row = self, row
        return row

    def append(self, rows: Ints, tokens: I32, kept: Ints) -> None:
        """New tokens `[n, q]` of each of `rows`, the first `kept` of them."""
        ends = self.collected[rows]
        for i in range(tokens.shape[1]):
            more = kept > i
            if more.all():
                self.tokens[rows, ends + i] = tokens[:, i]
            else:
                self.tokens[rows[more], ends[more] + i] = tokens[more, i]
        self.collected[rows] = ends + kept

    def take_back(self, rows: Ints, wrong: Ints) -> None:
        """So many tokens of each of `rows` had been counted on, and are not."""
        self.known[rows] -= wrong
        self.computed[rows] -= wrong

    def owner(self, row: int) -> Request:
        """The request that holds `row`."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def features(self, rows: np.ndarray) -> SamplingFeatures:
        """What sampling must do for at least one of `rows`."""
        flags = int(np.bitwise_or.reduce(self.flags[rows], initial=0))
        return SamplingFeatures.of_bits(flags, int(self.logprobs[rows].max(initial=-1)))

    def stop_ids(self, rows: Ints) -> Ints | None:
        """`stop` of `rows`; None when none of them has any."""
        ids = self.stop[rows]
        return ids if (ids >= 0).any() else None

    def _set_stop(self, row: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stop.shape[1]:
            wider = np.full((len(self.stop), len(ids)), -1, np.int64)
            wider[:, : self.stop.shape[1]] = self.stop
            self.stop = wider
        self.stop[row] = -1
        self.stop[row, : len(ids)] = ids

    def free_row(self, row: int) -> None:
        request = self.owner(row)
        self.requests[row] = None
        if len(request.stop_token_ids) > _FEW_STOPS:
            # Every step looks at all columns.
            used = max((len(other.stop_token_ids) for other in self.requests if other is not None), default=0)
            self.stop = self.stop[:, : max(used, _FEW_STOPS)].copy()
        self.epoch[row] += 1
        _ = request.output_token_ids
        request.rows, request.row = None, -1
        heapq.heappush(self._free, row)
