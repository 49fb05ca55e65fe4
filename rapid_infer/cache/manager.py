"""The blocks of all cache groups together: what each group's policy says, over the pools that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rapid_infer.cache.block_pool import BlockPool
from rapid_infer.cache.groups import GroupPolicy
from rapid_infer.cache.pools import shared_pools
from rapid_infer.cache.spec import CacheGroup

Blocks = list[list[int]]
"""A request's table in each group: block ids by column, 0 where it holds none."""


class _Group:
    """A policy, its pool, and how the pool's names tell its blocks from those of other groups."""

    def __init__(self, policy: GroupPolicy, pool: BlockPool, number: int) -> None:
        """`number`: that among the groups of its pool."""
        self.policy, self.pool = policy, pool
        self._suffix = suffix = bytes([number]) if number else b""
        self.cached: Callable[[bytes], bool] = (lambda digest: pool.has(digest + suffix)) if suffix else pool.has

    def name(self, digest: bytes) -> bytes:
        return digest + self._suffix if self._suffix else digest


class CacheManager:
    """Allocation and prefix hits. Which blocks a request needs, gives back and resumes from is the policies' matter."""

    def __init__(
        self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int, max_query: int = 1 << 30
    ) -> None:
        """`num_blocks`: of each of `shared_pools(groups)`. `max_query`: most tokens of a request in one step."""
        self.block_size, self._max_query = block_size, max_query
        self.pools = [BlockPool(n) for n in num_blocks]
        specs = shared_pools(groups)
        self._by_pool = [(pool, spec.groups) for pool, spec in zip(self.pools, specs)]
        place = {g: (pool, i) for pool, numbers in self._by_pool for i, g in enumerate(numbers)}
        self._groups = [_Group(group.spec.policy(block_size), *place[g]) for g, group in enumerate(groups)]
        self.has_checkpoints = any(group.policy.checkpoints for group in self._groups)
        self.trims = any(group.policy.trims for group in self._groups)
        limits = [group.policy.max_rollback for group in self._groups]
        self.max_rollback = min((limit for limit in limits if limit is not None), default=None)
        self.hit_tokens = 0
        self.queried_tokens = 0

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def pool_of(self, group: int) -> BlockPool:
        return self._groups[group].pool

    @property
    def num_free(self) -> int:
        """Blocks free in all pools together."""
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_free_columns(self) -> int:
        """How many columns can surely be added, of one request or several."""
        return min(pool.num_free // len(numbers) for pool, numbers in self._by_pool)

    @property
    def num_usable(self) -> int:
        return sum(pool.num_usable for pool in self.pools)

    def match(self, hashes: Sequence[bytes]) -> int:
        """The longest number of leading blocks after which every group can resume."""
        n = len(hashes)
        while True:
            shortest = n
            for group in self._groups:
                shortest = group.policy.resume(hashes[:shortest], group.cached)
            if shortest == n:
                return n
            n = shortest

    def admit(self, hashes: Sequence[bytes], tokens: int, reserve: int) -> Blocks | None:
        """Take over the cached blocks of `hashes`, that are seen from behind them; `grow` adds those for `tokens`.

        None, with nothing taken, unless what `reserve` tokens (at least `tokens`) need is free.
        """
        held: Blocks = []
        for group in self._groups:
            first = group.policy.seen_from(len(hashes)) if hashes else 0
            mine = [group.pool.block_of(group.name(digest)) for digest in hashes[first:]]
            group.pool.fork(mine)
            held.append([0] * first + mine)
        if not self._can_reserve(held, tokens, max(tokens, reserve)):
            self.release(held)
            return None
        return held

    def _can_reserve(self, held: Blocks, tokens: int, reserve: int) -> bool:
        for pool, numbers in self._by_pool:
            need = 0
            for g in numbers:
                policy, table = self._groups[g].policy, held[g]
                kept = len(table) - policy.seen_from(len(table))
                need += max(policy.most(reserve, self._max_query) - kept, policy.need(table, tokens, pool))
            if pool.num_free < need:
                return False
        return True

    def can_grow(self, blocks: Blocks, tokens: int, *, soon: bool = False) -> bool:
        """Whether a request's tables can hold `tokens` tokens; `soon`: once the steps in flight are collected."""
        for pool, numbers in self._by_pool:
            need = sum(self._groups[g].policy.need(blocks[g], tokens, pool) for g in numbers)
            if need > pool.num_free and not (soon and need <= pool.num_free + pool.num_deferred):
                return False
        return True

    def grow(self, blocks: Blocks, tokens: int, step: int) -> None:
        """Make the tables hold `tokens` tokens, for a row that runs in `step`; the caller has asked `can_grow`."""
        for group, mine in zip(self._groups, blocks):
            left = group.policy.grow(mine, tokens, group.pool)
            if left:
                group.pool.release_after(step, left)

    def trim(self, blocks: Blocks, computed: int, step: int) -> None:
        """Give back what no position from `computed` on sees, once `step` has been collected."""
        for group, mine in zip(self._groups, blocks):
            if group.policy.trims:
                group.pool.release_after(step, group.policy.trim(mine, computed))

    def end_of_step(self, start: int, stop: int, prompt: int) -> int:
        """Where a step of positions `start .. stop` should end, so that groups can name what they hold then."""
        return min(group.policy.end_of_step(start, stop, prompt) for group in self._groups)

    def keeps(self, computed: int, prompt: int) -> bool:
        """Whether some group wants to name what stands for `computed` tokens."""
        return any(group.policy.keeps(computed, prompt) for group in self._groups)

    def checkpoint(self, blocks: Blocks, computed: int, prompt: int, digest: bytes) -> None:
        """Name what stands for all `computed` tokens, the last full block being `digest`, before the next step is
        planned.
        """
        for group, mine in zip(self._groups, blocks):
            if group.policy.keeps(computed, prompt):
                group.pool.cache_block(mine[-1], group.name(digest))

    def cache_blocks(self, blocks: Blocks, start: int, hashes: Sequence[bytes]) -> None:
        """Name the contents of blocks `start..`, where they are what the block's own tokens left."""
        for group, mine in zip(self._groups, blocks):
            if not group.policy.checkpoints:
                for i, digest in enumerate(hashes, start):
                    if mine[i]:
                        group.pool.cache_block(mine[i], group.name(digest))

    def uncache_blocks(self, blocks: Blocks) -> None:
        """Nobody may hit these blocks any more: the step that filled them failed."""
        for group, mine in zip(self._groups, blocks):
            group.pool.uncache_blocks(mine)

    def uncache_deferred(self) -> None:
        """The same for the blocks of requests that left while the step was in flight."""
        for pool in self.pools:
            pool.uncache_deferred()

    def release(self, blocks: Blocks) -> None:
        for group, mine in zip(self._groups, blocks):
            group.pool.release(_held(mine))

    def release_after(self, step: int, blocks: Blocks) -> None:
        """Give the blocks back once `step` has been collected."""
        for group, mine in zip(self._groups, blocks):
            group.pool.release_after(step, _held(mine))

    def collected(self, step: int) -> None:
        for pool in self.pools:
            pool.collected(step)

    def reset_cache(self) -> None:
        for pool in self.pools:
            pool.reset_cache()

    def check(self, held: Sequence[Blocks]) -> None:
        """Integrity of every pool against the blocks that live requests hold."""
        for pool, numbers in self._by_pool:
            pool.check(block for blocks in held for g in numbers for block in _held(blocks[g]))


def _held(table: Sequence[int]) -> list[int]:
    return [block for block in table if block]
