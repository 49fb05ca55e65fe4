"""Which tokens of which request run in the next step.

There is no prefill and no decode here: each row has known and computed tokens, and a step's token budget lets the
second catch up with the first, running rows in order of admission, then waiting ones. Chunked prefill, prefix hits and
preemption are
that rule.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rapid_infer.cache import prefix
from rapid_infer.cache.manager import CacheManager
from rapid_infer.config import SchedulerConfig
from rapid_infer.engine.plan_builder import PlanBuilder
from rapid_infer.engine.plan_cache import PlanCache
from rapid_infer.engine.request import Request, RequestStatus
from rapid_infer.engine.row_state import NOT_SHARED, RowState
from rapid_infer.engine.scheduled_step import ScheduledStep
from rapid_infer.outputs import FinishReason

Ints = NDArray[np.int64]


@dataclass
class SchedulerStats:
    preemptions: int = 0
    steps: int = 0


@dataclass
class Scheduler:
    """FCFS. Owns requests, rows and blocks; knows nothing of devices, text or the model.

    `drafts`: how many tokens of a row the device guesses, and verifies, in a step beside the one it has chosen. Rows
    are counted as if all were right, and lowered when results come; blocks are named for tokens that came alone.
    """

    config: SchedulerConfig
    cache: CacheManager
    max_model_len: int
    drafts: int = 0
    rows: RowState = field(init=False)
    waiting: deque[Request] = field(default_factory=deque)
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    last_step: int = 0

    def __post_init__(self) -> None:
        self.rows = RowState(self.config.max_num_seqs, self.max_model_len)
        if self.cache.max_rollback is not None:
            self.drafts = min(self.drafts, self.cache.max_rollback)
        self._order: Ints = np.zeros(0, np.int64)
        self._plan_cache: PlanCache | None = None
        self._hashed: Request | None = None

    @property
    def running(self) -> list[Request]:
        """Requests that hold a row, in order of admission."""
        return [r for r in (self.rows.requests[row] for row in self._order) if r is not None]

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when no row can take a token now."""
        if self._plan_cache is not None and not (self.waiting and self.rows.num_free):
            step = self._plan_cache.next(self.last_step + 1)
            if step is not None:
                self.last_step += 1
                self.stats.steps += 1
                return step
        self._plan_cache = None
        builder = PlanBuilder(self.cache.num_groups)
        if self.cache.has_checkpoints:
            self._name_states()
        order, grant = self._share_budget()
        order, grant, preempted = self._make_room(order, grant, builder)
        if self.waiting and self.rows.num_free:
            # Whoever is admitted now already shares the blocks that this step will fill.
            self._cache_full_blocks(order, grant)
        if not preempted:
            admitted, more = self._admit(int(grant.sum()), builder)
            order, grant = np.concatenate([order, admitted]), np.concatenate([grant, more])
        self._order = order
        if not grant.all():
            order, grant = order[grant > 0], grant[grant > 0]
        return self._make_step(order, grant, builder) if len(order) else None

    def _share_budget(self) -> tuple[Ints, Ints]:
        rows, order = self.rows, self._order
        need = np.minimum(rows.known[order], rows.limit[order] - 1) - rows.computed[order]
        budget = self.config.max_num_batched_tokens
        if self.drafts:
            need = need + self._guesses(order, need, budget)
        if self.cache.has_checkpoints:
            for i in np.flatnonzero(need > 1):
                need[i] = self._end_of_step(rows.owner(order[i]), int(rows.computed[order[i]]), int(need[i]))
        if need.sum() <= budget:
            return order, need
        before = np.cumsum(need) - need
        if self.config.enable_chunked_prefill:
            return order, np.minimum(need, np.maximum(budget - before, 0))
        return order, np.where(before + need <= budget, need, 0)

    def _guesses(self, order: Ints, need: Ints, budget: int) -> Ints:
        """How many tokens of each row the device may guess: where all it knows is computed but the last one, which the
        device has chosen itself. None for anybody where all together are too many.
        """
        rows = self.rows
        able = (need == 1) & rows.drafts[order] & (rows.computed[order] >= rows.initial[order])
        most = np.minimum(self.drafts, rows.limit[order] - 1 - rows.known[order])
        guesses = np.where(able, most, 0)
        return guesses if need.sum() + guesses.sum() <= budget else np.zeros_like(guesses)

    def _end_of_step(self, request: Request, computed: int, grant: int) -> int:
        """The part of `grant` that ends where the cache wants a step to end."""
        return self.cache.end_of_step(computed, computed + grant, len(request.prompt_token_ids)) - computed

    def _make_room(self, order: Ints, grant: Ints, builder: PlanBuilder) -> tuple[Ints, Ints, bool]:
        """Give every row blocks for its granted tokens, preempting the latest rows when the pool is short."""
        rows, end = self.rows, len(order)
        stop, capacity = rows.computed[order] + grant, rows.capacity[order]
        short = np.flatnonzero(stop > capacity)
        for i, row, tokens in zip(short.tolist(), order[short].tolist(), stop[short].tolist()):
            if i >= end:
                break
            blocks = rows.owner(row).blocks
            if self.cache.trims:
                self._trim(row)
            # What comes back with the steps in flight is worth waiting for; preempting more would only recompute more.
            while end > i and not self.cache.can_grow(blocks, tokens, soon=True):
                end -= 1
                self._preempt(int(order[end]))
            if end <= i:
                break
            if not self.cache.can_grow(blocks, tokens):
                grant[i] = 0
                continue
            self._grow(row, tokens, builder)
        return order[:end], grant[:end], end < len(order)

    def _grow(self, row: int, tokens: int, builder: PlanBuilder) -> None:
        blocks, size = self.rows.owner(row).blocks, self.cache.block_size
        self.cache.grow(blocks, tokens, self.last_step + 1)
        builder.add_blocks(row, int(self.rows.capacity[row]) // size, blocks)
        self.rows.capacity[row] = len(blocks[0]) * size

    def _admit(self, used: int, builder: PlanBuilder) -> tuple[Ints, Ints]:
        admitted: list[int] = []
        grants: list[int] = []
        budget = self.config.max_num_batched_tokens - used
        while self.waiting and budget > 0 and self.rows.num_free:
            request = self.waiting[0]
            if request.in_flight:
                break
            grant = self._admit_one(request, budget, builder)
            if not grant:
                break
            self.waiting.popleft()
            admitted.append(request.row)
            grants.append(grant)
            budget -= grant
        return np.array(admitted, np.int64), np.array(grants, np.int64)

    def _admit_one(self, request: Request, budget: int, builder: PlanBuilder) -> int:
        """Start `request` with as many tokens as budget and blocks allow; 0 when it has to wait."""
        size, total = self.cache.block_size, request.num_tokens
        hashes = self._hashes(request, total)
        # The last token is always computed: its logits give the next one.
        hits = self.cache.match(hashes[: (total - 1) // size]) if request.reads_cache else 0
        grant = total - hits * size
        if grant > budget:
            if not self.config.enable_chunked_prefill:
                return 0
            grant = budget
        grant = self._end_of_step(request, hits * size, grant)
        # Reserving the whole known length keeps a half-admitted prompt from being preempted by the rows before it at
        # once.
        blocks = self.cache.admit(hashes[:hits], hits * size + grant, reserve=total)
        if blocks is None:
            return 0
        request.blocks = blocks
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hits * size
            self.cache.hit_tokens += hits * size
            self.cache.queried_tokens += total
        cached = NOT_SHARED if request.cache_salt is None else hits
        row = self.rows.assign_row(request, hits * size, hits * size, cached)
        builder.add_row(row, hits * size, request)
        builder.add_blocks(row, 0, blocks)
        self._grow(row, hits * size + grant, builder)
        # For those admitted after it, as in `schedule`.
        self._cache_row(row, hits * size + grant)
        return grant

    def _hashes(self, request: Request, total: int) -> list[bytes]:
        if request.cache_salt is None:
            return []
        size, chain = self.cache.block_size, request.block_hashes
        if len(chain) < total // size:
            if not chain:
                chain += self._hashed_before(request)
            parent = chain[-1] if chain else prefix.root(size, request.cache_salt)
            first = len(chain) * size
            prefix.extend(chain, parent, request.tokens(first, total), size, request.extras, first)
        return chain

    def _hashed_before(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that it has in common with the request hashed last: many begin with the same text."""
        last, self._hashed = self._hashed, request
        if last is None or last.cache_salt != request.cache_salt:
            return []
        n = min(len(last.prompt_token_ids), len(request.prompt_token_ids))
        differ = last.prompt_token_ids[:n] != request.prompt_token_ids[:n]
        same = int(differ.argmax()) if differ.any() else n
        other = prefix.first_difference(last.extras, request.extras)
        if other is not None:
            same = min(same, other)
        return last.block_hashes[: same // self.cache.block_size]

    def _trim(self, row: int) -> None:
        """Give back blocks that nothing sees any more, under the names by which others may still want them."""
        rows = self.rows
        certain = min(int(rows.computed[row]), int(rows.collected[row]))
        self._cache_row(row, certain)
        self.cache.trim(rows.owner(row).blocks, certain, self.last_step)

    def _name_states(self) -> None:
        """Name the states that the steps planned so far leave behind, where they are to be checkpoints."""
        rows, size = self.rows, self.cache.block_size
        for row in self._order.tolist():
            request, computed = rows.owner(row), int(rows.computed[row])
            whole = computed == rows.capacity[row] and computed <= rows.collected[row]
            prompt = len(request.prompt_token_ids)
            if whole and request.cache_salt is not None and self.cache.keeps(computed, prompt):
                digest = self._hashes(request, computed)[computed // size - 1]
                self.cache.checkpoint(request.blocks, computed, prompt, digest)

    def _cache_row(self, row: int, computed: int) -> None:
        """Name the row's blocks that are full of `computed` tokens which the host has seen.

        Others can share them then. That is time enough when the row leaves, or somebody is admitted.
        """
        rows = self.rows
        request = rows.owner(row)
        start = int(rows.cached[row])
        stop = min(computed, int(rows.collected[row])) // self.cache.block_size
        if stop > start:
            hashes = self._hashes(request, stop * self.cache.block_size)
            self.cache.cache_blocks(request.blocks, start, hashes[start:stop])
            rows.cached[row] = stop

    def _cache_full_blocks(self, order: Ints, grant: Ints) -> None:
        rows = self.rows
        stop = rows.computed[order] + grant
        full = np.minimum(stop, rows.collected[order]) // self.cache.block_size
        for i in np.flatnonzero(full > rows.cached[order]):
            self._cache_row(int(order[i]), int(stop[i]))

    def _make_step(self, order: Ints, grant: Ints, builder: PlanBuilder) -> ScheduledStep:
        rows = self.rows
        if grant.max() > 1:
            # Single tokens first: attention treats them apart from longer queries.
            by_length = np.argsort(grant > 1, kind="stable")
            order, grant = order[by_length], grant[by_length]
        self.last_step += 1
        self.stats.steps += 1
        start = rows.computed[order]
        stop = start + grant
        rows.computed[order] = stop
        guesses = np.maximum(stop - rows.known[order], 0) if self.drafts else np.zeros_like(stop)
        samples = stop >= rows.known[order]
        sampled_rows = order if samples.all() else order[samples]
        most = guesses[samples] + 1
        rows.known[sampled_rows] += most
        plan = builder.build(self.last_step, rows, order, start, grant, np.flatnonzero(samples), guesses)
        if PlanCache.fits(plan, rows, self.cache, self._order) and not self.drafts:
            self._plan_cache = PlanCache(rows, self.cache, order, self._trim if self.cache.trims else None)
        requests = [rows.owner(row) for row in order.tolist()]
        sampled = requests if samples.all() else [requests[i] for i in plan.sampled.tolist()]
        return ScheduledStep(
            plan,
            requests,
            sampled,
            [request.request_id for request in sampled],
            sampled_rows,
            rows.epoch[sampled_rows],
            most,
            rows.limit[sampled_rows],
            rows.stop_ids(sampled_rows),
            builder.prompt_logprob_counts,
            builder.admitted,
            builder.failed,
            builder.gated,
        )

    def _preempt(self, row: int) -> None:
        request = self.rows.owner(row)
        request.in_flight = int(self.rows.known[row] - self.rows.collected[row])
        request.num_preemptions += 1
        self.stats.preemptions += 1
        # It will find them again when it comes back.
        self._cache_row(request.row, int(self.rows.computed[request.row]))
        self._leave(request)
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        """Give back row and blocks; the blocks once no step in flight names them."""
        self.rows.free_row(request.row)
        self.cache.release_after(self.last_step, request.blocks)
        request.blocks = []

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request that has not ended. Its blocks stay reusable unless it ended in an error."""
        assert request.status is not RequestStatus.FINISHED, f"{request.request_id} ended twice"
        self._plan_cache = None
        if reason is FinishReason.ERROR:
            self.cache.uncache_blocks(request.blocks)
        if request.status is RequestStatus.RUNNING:
            if reason is not FinishReason.ERROR:
                # With two steps in flight the last full block became known only now.
                self._cache_row(request.row, int(self.rows.computed[request.row]))
            self._order = self._order[self._order != request.row]
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.error = error
