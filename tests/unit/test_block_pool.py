"""Who holds which block, in which order blocks are reused, and what can be hit."""

import pytest

from rapid_infer.cache.block_pool import BlockPool


def held_pool(n: int = 8, held: int = 4) -> tuple[BlockPool, list[int]]:
    pool = BlockPool(n)
    return pool, pool.allocate(held)


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 blocks \(block 0 is padding\), got 1"):
        BlockPool(1)


def test_allocating_more_than_is_free_takes_nothing() -> None:
    pool, held = held_pool(n=6, held=3)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check(held)


def test_a_forked_block_is_free_only_after_its_last_release() -> None:
    pool, (block, *rest) = held_pool()
    pool.fork([block])
    pool.release([block])
    assert (pool.count(block), pool.num_free) == (1, 3)
    pool.release([block])
    assert (pool.count(block), pool.num_free) == (0, 4)
    pool.check(rest)


def test_releasing_more_often_than_held_is_an_error() -> None:
    pool, (block, *_) = held_pool()
    pool.release([block])
    with pytest.raises(ValueError, match=f"block {block} released more often than held"):
        pool.release([block])


def test_the_tail_of_a_sequence_is_reused_before_its_head() -> None:
    pool, held = held_pool(n=5, held=4)
    pool.release(held)
    assert pool.allocate(4) == held[::-1]


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    pool, (cached, plain) = held_pool(n=3, held=2)
    pool.cache_block(cached, b"x")
    pool.release([plain, cached])
    assert pool.allocate(1) == [plain]
    assert pool.has(b"x")
    assert pool.allocate(1) == [cached]
    assert not pool.has(b"x")


def test_cached_blocks_are_evicted_least_recently_used_first() -> None:
    pool, held = held_pool(n=4, held=3)
    for block, digest in zip(held, (b"a", b"b", b"c")):
        pool.cache_block(block, digest)
    for block in held:
        pool.release([block])
    pool.fork(held[:1])
    pool.release(held[:1])
    assert pool.allocate(3) == [held[1], held[2], held[0]]
    assert pool.num_cached == 0


def test_a_free_block_can_be_taken_back_by_its_content() -> None:
    pool, (block, *rest) = held_pool()
    assert pool.cache_block(block, b"x")
    pool.release([block])
    free = pool.num_free
    pool.fork([pool.block_of(b"x")])
    assert (pool.count(block), pool.num_free) == (1, free - 1)
    assert block not in pool.allocate(pool.num_free)
    with pytest.raises(KeyError):
        pool.block_of(b"never published")
    assert rest


def test_content_is_cached_once() -> None:
    pool, (first, second, *_) = held_pool()
    assert pool.cache_block(first, b"x")
    assert not pool.cache_block(second, b"x")
    assert not pool.cache_block(first, b"y")
    assert (pool.block_of(b"x"), pool.has(b"y"), pool.num_cached) == (first, False, 1)


def test_uncached_content_cannot_be_hit_whether_the_block_is_held_or_free() -> None:
    pool, (held, freed, other, bare) = held_pool()
    for block, digest in ((held, b"held"), (freed, b"freed"), (other, b"other")):
        pool.cache_block(block, digest)
    pool.release([freed, other])
    pool.uncache_blocks([held, freed, bare])
    assert [pool.has(d) for d in (b"held", b"freed", b"other")] == [False, False, True]
    pool.check([held, bare])
    assert pool.allocate(pool.num_free)[-1] == other


def test_reset_forgets_contents_and_keeps_holders() -> None:
    pool, (held, freed, *rest) = held_pool()
    pool.cache_block(held, b"a")
    pool.cache_block(freed, b"b")
    pool.release([freed])
    pool.reset_cache()
    assert pool.num_cached == 0
    pool.check([held, *rest])


def test_a_deferred_free_waits_until_its_step_is_collected() -> None:
    pool, held = held_pool(n=5, held=4)
    pool.release_after(2, held[:1])
    pool.release_after(3, held[1:3])
    assert (pool.num_free, pool.num_deferred) == (0, 3)
    pool.check(held[3:])
    pool.collected(1)
    assert pool.num_free == 0
    pool.collected(2)
    assert (pool.num_free, pool.num_deferred) == (1, 2)
    pool.collected(7)
    assert (pool.num_free, pool.num_deferred) == (3, 0)


def test_a_free_after_a_collected_step_is_immediate() -> None:
    pool, held = held_pool()
    pool.collected(4)
    pool.release_after(4, held)
    assert (pool.num_free, pool.num_deferred) == (7, 0)


def test_a_deferred_block_can_be_hit_and_stays_held() -> None:
    pool, (block, *rest) = held_pool()
    pool.cache_block(block, b"x")
    pool.release_after(1, [block])
    pool.fork([pool.block_of(b"x")])
    assert pool.num_deferred == 0
    pool.collected(1)
    assert pool.count(block) == 1
    pool.check([block, *rest])


def test_after_a_failed_step_deferred_blocks_cannot_be_hit() -> None:
    pool, (waiting, held, *_) = held_pool()
    pool.cache_block(waiting, b"waiting")
    pool.cache_block(held, b"held")
    pool.release_after(1, [waiting])
    pool.uncache_deferred()
    assert (pool.has(b"waiting"), pool.has(b"held")) == (False, True)


def test_the_integrity_check_finds_leaks_and_frees_of_held_blocks() -> None:
    pool, held = held_pool()
    pool.check(held)
    with pytest.raises(AssertionError, match=r"blocks \[4\] have counts \[1\]"):
        pool.check(held[:-1])
    with pytest.raises(AssertionError, match="have counts"):
        pool.check([*held, held[0]])
    pool.release(held[:1])
    with pytest.raises(AssertionError, match="have counts"):
        pool.check(held)
