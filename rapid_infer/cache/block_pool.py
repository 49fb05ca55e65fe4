"""Blocks by number: who holds them, which are free, and which content each one has.

A block is held by count (requests and steps in flight) and free at zero; a free block keeps its content, and its hash,
until it is handed out again, least recently used first. Block 0 is never handed out: padding rows write there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """All methods are O(blocks named). Invariant: every block but 0 is either free or has a count above zero."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (block 0 is padding), got {num_blocks}")
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Two ordered queues: a block without a hash can never be hit again, so it goes first.
        # Not plain dicts: finding the first key of one takes as long as keys were deleted before it.
        self._free_plain = OrderedDict[int, None].fromkeys(range(1, num_blocks))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._deferred: deque[tuple[int, Sequence[int]]] = deque()
        self._collected = 0

    @property
    def num_free(self) -> int:
        return len(self._free_plain) + len(self._free_cached)

    @property
    def num_usable(self) -> int:
        """Blocks a request could ever get."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        return len(self._by_hash)

    @property
    def num_deferred(self) -> int:
        """Blocks that become free once the steps in flight are collected."""
        return sum(1 for _, blocks in self._deferred for b in blocks if self._counts[b] == 1)

    def count(self, block: int) -> int:
        return self._counts[block]

    def is_private(self, block: int) -> bool:
        """Whether it has one holder, and no name by which others could find it."""
        return self._counts[block] == 1 and self._hashes[block] is None

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with count 1 and no content. ValueError when fewer are free: ask `num_free` first."""
        if n > self.num_free:
            raise ValueError(f"{n} blocks wanted, {self.num_free} free")
        return [self._take() for _ in range(n)]

    def _take(self) -> int:
        block, _ = (self._free_plain or self._free_cached).popitem(last=False)
        self._forget(block)
        self._counts[block] = 1
        return block

    def fork(self, blocks: Iterable[int]) -> None:
        """One more holder for each block; a free block that still has its content is taken out of the free queue."""
        for block in blocks:
            if self._counts[block] == 0:
                (self._free_plain if self._hashes[block] is None else self._free_cached).pop(block)
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each. Last block first, so that of one sequence the tail is reused before its head."""
        for block in reversed(blocks):
            if self._counts[block] <= 0:
                raise ValueError(f"block {block} released more often than held")
            self._counts[block] -= 1
            if self._counts[block] == 0:
                (self._free_plain if self._hashes[block] is None else self._free_cached)[block] = None

    def release_after(self, step: int, blocks: Sequence[int]) -> None:
        """Release once `step` has been collected: until then the device may still read or write these blocks."""
        if step <= self._collected:
            self.release(blocks)
        elif blocks:
            self._deferred.append((step, blocks))

    def collected(self, step: int) -> None:
        """All steps up to `step` are done on the device: carry out what waited for them."""
        self._collected = step
        while self._deferred and self._deferred[0][0] <= step:
            self.release(self._deferred.popleft()[1])

    def has(self, digest: bytes) -> bool:
        """Whether some block has this content."""
        return digest in self._by_hash

    def block_of(self, digest: bytes) -> int:
        """The block with this content. KeyError when there is none."""
        return self._by_hash[digest]

    def cache_block(self, block: int, digest: bytes) -> bool:
        """Say what a held block contains. False, and no change, when another block already has this content."""
        if digest in self._by_hash or self._hashes[block] is not None:
            return False
        self._by_hash[digest] = block
        self._hashes[block] = digest
        return True

    def uncache_blocks(self, blocks: Iterable[int]) -> None:
        """The content is not what was cached (its step failed): nobody may hit these blocks any more."""
        for block in blocks:
            if self._hashes[block] is not None:
                if self._counts[block] == 0:
                    del self._free_cached[block]
                    self._free_plain[block] = None
                self._forget(block)

    def uncache_deferred(self) -> None:
        """A step in flight failed: blocks whose holder left meanwhile may lack what was cached."""
        for _, blocks in self._deferred:
            self.uncache_blocks(blocks)

    def _forget(self, block: int) -> None:
        digest = self._hashes[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hashes[block] = None

    def reset_cache(self) -> None:
        """Forget all contents; held blocks stay held."""
        self.uncache_blocks(list(self._by_hash.values()))

    def check(self, held: Iterable[int]) -> None:
        """Integrity: `held` lists each block once per holder.

        AssertionError when a block leaked or is free and held.
        """
        counts = [0] * self.num_blocks
        for block in held:
            counts[block] += 1
        for _, blocks in self._deferred:
            for block in blocks:
                counts[block] += 1
        wrong = [b for b in range(self.num_blocks) if counts[b] != self._counts[b]]
        assert not wrong, f"blocks {wrong[:8]} have counts {[self._counts[b] for b in wrong[:8]]}, held {counts}"
        free = {**self._free_plain, **self._free_cached}
        assert len(free) == self.num_free, "a block is in both free queues"
        assert all((self._counts[b] == 0) == (b in free) for b in range(1, self.num_blocks)), "free queue is wrong"
        assert all(self._hashes[b] == d for d, b in self._by_hash.items()), "hash table is wrong"
