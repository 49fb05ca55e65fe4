"""The blocks of all cache groups together: a request needs one block of every group for each `block_size` tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rapid_infer.cache.block_pool import BlockPool
from rapid_infer.cache.spec import CacheGroup, blocks_for

Blocks = list[list[int]]
"""Block ids of one request: per group, in token order. Append-only while the request holds them."""


class CacheManager:
    """Allocation and prefix hits over one `BlockPool` per group, all of equal size."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: int, block_size: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.pools = [BlockPool(num_blocks) for _ in groups]
        self.hit_tokens = 0
        self.queried_tokens = 0

    @property
    def num_free(self) -> int:
        """Blocks free in every group."""
        return min(pool.num_free for pool in self.pools)

    @property
    def num_free_soon(self) -> int:
        """Blocks free once the steps in flight are collected."""
        return min(pool.num_free + pool.num_deferred for pool in self.pools)

    @property
    def num_usable(self) -> int:
        return self.pools[0].num_usable

    def match(self, hashes: Sequence[bytes]) -> int:
        """The longest number of leading blocks at which every group can resume."""
        n = len(hashes)
        while True:
            shortest = n
            for group, pool in zip(self.groups, self.pools):
                shortest = group.spec.longest_resume(hashes[:shortest], pool.has)
            if shortest == n:
                return n
            n = shortest

    def admit(self, hashes: Sequence[bytes], tokens: int, reserve: int) -> Blocks | None:
        """Take over the cached blocks of `hashes` and add new ones to hold `tokens`.

        None, with nothing taken, unless blocks for `reserve` tokens (at least `tokens`) are free in every group.
        """
        held: Blocks = [[pool.block_of(h) for h in hashes] for pool in self.pools]
        for pool, blocks in zip(self.pools, held):
            pool.fork(blocks)
        if self.num_free < blocks_for(max(tokens, reserve), self.block_size) - len(hashes):
            self.release(held)
            return None
        self.extend(held, blocks_for(tokens, self.block_size) - len(hashes))
        return held

    def extend(self, blocks: Blocks, n: int) -> None:
        """`n` more blocks of every group; the caller has asked `num_free`."""
        for pool, mine in zip(self.pools, blocks):
            mine.extend(pool.allocate(n))

    def publish(self, blocks: Blocks, start: int, hashes: Sequence[bytes]) -> None:
        """Name the contents of blocks `start..`."""
        for pool, mine in zip(self.pools, blocks):
            for i, digest in enumerate(hashes, start):
                pool.publish(mine[i], digest)

    def unpublish(self, blocks: Blocks) -> None:
        """Nobody may hit these blocks any more: the step that filled them failed."""
        for pool, mine in zip(self.pools, blocks):
            pool.unpublish(mine)

    def unpublish_deferred(self) -> None:
        """The same for the blocks of requests that left while the step was in flight."""
        for pool in self.pools:
            pool.unpublish_deferred()

    def release(self, blocks: Blocks) -> None:
        for pool, mine in zip(self.pools, blocks):
            pool.release(mine)

    def release_after(self, step: int, blocks: Blocks) -> None:
        """Give the blocks back once `step` has been collected."""
        for pool, mine in zip(self.pools, blocks):
            pool.release_after(step, mine)

    def collected(self, step: int) -> None:
        for pool in self.pools:
            pool.collected(step)

    def reset_cache(self) -> None:
        for pool in self.pools:
            pool.reset_cache()

    def check(self, held: Sequence[Blocks]) -> None:
        """Integrity of every pool against the blocks that live requests hold."""
        for g, pool in enumerate(self.pools):
            pool.check(block for blocks in held for block in blocks[g])
