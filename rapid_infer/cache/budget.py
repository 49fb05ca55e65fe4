"""How much memory the caches get, and how many blocks that is: arithmetic on numbers that the worker measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rapid_infer.cache.groups import GroupPolicy
from rapid_infer.cache.pools import PoolSpec, shared_pools
from rapid_infer.cache.spec import CacheGroup
from rapid_infer.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True)
class CacheDemand:
    """What requests ask of the caches: `rows` of them at once, each with at most `max_query` tokens in one step."""

    groups: Sequence[CacheGroup]
    block_size: int
    max_query: int
    rows: int

    @property
    def pools(self) -> list[PoolSpec]:
        return shared_pools(self.groups)

    def policies(self, pool: PoolSpec) -> list[GroupPolicy]:
        return [self.groups[g].spec.policy(self.block_size) for g in pool.groups]

    def blocks(self, pool: PoolSpec, tokens: int) -> int:
        """Most blocks of `pool` that one request of `tokens` tokens holds."""
        return sum(policy.most(tokens, self.max_query) for policy in self.policies(pool))

    def bytes(self, tokens: int, requests: int) -> int:
        """Bytes that hold `requests` requests of `tokens` tokens, and the padding blocks."""
        sizes = ((pool.page_bytes(self.block_size), self.blocks(pool, tokens)) for pool in self.pools)
        return sum(page * (requests * blocks + 1) for page, blocks in sizes)


@dataclass(frozen=True)
class CachePlan:
    """`num_blocks`: of each pool, block 0 (padding) included. `bytes_per_block`: one block of every group."""

    demand: CacheDemand
    num_blocks: tuple[int, ...]
    bytes_per_block: int
    budget: int

    @property
    def block_size(self) -> int:
        return self.demand.block_size

    def short(self, tokens: int) -> PoolSpec | None:
        """A pool that does not hold one request of `tokens` tokens, if there is one."""
        counts = zip(self.demand.pools, self.num_blocks)
        return next((pool for pool, n in counts if self.demand.blocks(pool, tokens) > n - 1), None)

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest request that fits. Where every group keeps all, also those of all requests together."""
        most = max(self.num_blocks, default=0) * self.block_size
        columns = range(most // self.block_size + 1)
        fits = bisect_right(columns, 0, key=lambda n: self.short(n * self.block_size) is not None)
        return max(fits - 1, 0) * self.block_size

    @property
    def total_bytes(self) -> int:
        return sum(n * pool.page_bytes(self.block_size) for pool, n in zip(self.demand.pools, self.num_blocks))

    def __str__(self) -> str:
        sizes = " + ".join(
            f"{n} blocks x {self.block_size} tokens x {pool.page_bytes(self.block_size) // self.block_size} bytes/token"
            f" in {pool.spec.dtype}"
            for n, pool in zip(self.num_blocks, self.demand.pools)
        )
        return f"KV cache: {sizes} = {self.total_bytes / GIB:.2f} GiB ({self.num_tokens} tokens)"


def plan_blocks(demand: CacheDemand, budget: int, max_len: int) -> CachePlan:
    """As many blocks as `budget` bytes hold, of every group equally many.

    But pools of states get what all rows hold at once, and at most half of the bytes; and those that have windows alone
    no more than rows of `max_len` tokens hold at once, where others can use the rest.
    """
    size, pools = demand.block_size, demand.pools
    page = [pool.page_bytes(size) for pool in pools]
    enough = [demand.rows * demand.blocks(pool, max_len) + 1 for pool in pools]
    states, trims = (
        [all(getattr(policy, name) for policy in demand.policies(pool)) for pool in pools]
        for name in ("checkpoints", "trims")
    )
    counts = {p: max(min(enough[p], budget // 2 // page[p]), 0) for p, holds in enumerate(states) if holds}
    left = budget - sum(n * page[p] for p, n in counts.items())
    while True:
        others = [p for p in range(len(pools)) if p not in counts]
        per_block = sum(len(pools[p].groups) * page[p] for p in others)
        each = max(left // per_block, 0) if others else 0
        capped = [p for p in others if trims[p] and enough[p] < each * len(pools[p].groups)]
        if not capped or len(capped) == len(others):
            break
        counts[capped[0]] = enough[capped[0]]
        left -= enough[capped[0]] * page[capped[0]]
    counts |= {p: each * len(pools[p].groups) for p in others}
    bytes_per_block = sum(len(pool.groups) * size for pool, size in zip(pools, page))
    return CachePlan(demand, tuple(counts[p] for p in range(len(pools))), bytes_per_block, budget)


def fit_model_len(plan: CachePlan, max_model_len: int, *, shrink: bool) -> int:
    """The longest sequence the pools can hold.

    ConfigError, with the arithmetic, when they are too small and may not shrink.
    """
    pool = plan.short(max_model_len)
    if pool is None:
        return max_model_len
    if shrink and plan.num_tokens > 0:
        return plan.num_tokens
    need = plan.demand.blocks(pool, max_model_len) + 1
    page, blocks = pool.page_bytes(plan.block_size), plan.num_blocks[plan.demand.pools.index(pool)]
    raise ConfigError(
        f"the KV cache is too small for one request of max_model_len={max_model_len}: it needs {need} blocks of "
        f"{plan.block_size} tokens x {page} bytes = {need * page} bytes, and has {plan.budget} bytes = {blocks} "
        "blocks; lower max_model_len or raise kv_cache_memory_bytes"
    )
