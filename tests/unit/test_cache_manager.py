"""Hits and allocation over several groups of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from fake_executor import ToyKV

from rapid_infer.cache import prefix
from rapid_infer.cache.groups import GroupPolicy
from rapid_infer.cache.manager import Blocks, CacheManager
from rapid_infer.cache.pools import shared_pools
from rapid_infer.cache.spec import MLAKV, CacheGroup, FullKV

FULL = CacheGroup(FullKV(1, 8, "float32"), 2)
MLA = CacheGroup(MLAKV(8, 4, "float32"), 1)
SIZE = 4


@dataclass(frozen=True)
class EverySecond(FullKV):
    """Resumes at even numbers of blocks only, as a layer with a state in every second block would."""

    def policy(self, block_size: int) -> GroupPolicy:
        return EverySecondPolicy(block_size)


class EverySecondPolicy(GroupPolicy):
    def resume(self, hashes: Sequence[bytes], cached: Callable[[bytes], bool]) -> int:
        return super().resume(hashes, cached) // 2 * 2


class Manager(CacheManager):
    def start(self, hashes: Sequence[bytes], tokens: int, reserve: int) -> Blocks | None:
        """Admit a request, and let it hold `tokens`."""
        held = self.admit(hashes, tokens, reserve)
        if held is not None:
            self.grow(held, tokens, step=1)
        return held


def manager(*groups: CacheGroup, num_blocks: int = 12, max_query: int = 1 << 30) -> Manager:
    groups = groups or (FULL,)
    return Manager(groups, [num_blocks] * len(shared_pools(groups)), SIZE, max_query)


def hashes(n: int) -> list[bytes]:
    chain: list[bytes] = []
    prefix.extend(chain, prefix.root(SIZE), range(n * SIZE), SIZE)
    return chain


def fill(cache: CacheManager, n: int) -> list[bytes]:
    """Put `n` cached and free blocks into every group."""
    chain = hashes(n)
    blocks = cache.start([], n * SIZE, reserve=0)
    assert blocks is not None
    cache.cache_blocks(blocks, 0, chain)
    cache.release(blocks)
    return chain


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_request_gets_one_block_of_every_group_per_block_size_tokens(tokens: int, blocks: int) -> None:
    cache = manager(FULL, MLA)
    held = cache.start([], tokens, reserve=tokens)
    assert held is not None
    assert [len(mine) for mine in held] == [blocks, blocks]
    assert cache.num_free == cache.num_usable - 2 * blocks
    cache.check([held])


def test_admission_needs_room_for_the_reserve_and_takes_only_the_tokens() -> None:
    cache = manager(num_blocks=6)
    assert cache.start([], 4, reserve=21) is None
    assert cache.num_free == 5
    held = cache.start([], 4, reserve=20)
    assert held is not None
    assert cache.num_free == 4


def test_a_refused_admission_gives_its_hits_back() -> None:
    cache = manager(num_blocks=6)
    chain = fill(cache, 2)
    assert cache.start(chain, 24, reserve=24) is None
    cache.check([])
    assert cache.match(chain) == 2


def test_hits_count_towards_the_reserve() -> None:
    cache = manager(num_blocks=6)
    chain = fill(cache, 2)
    held = cache.start(chain, 20, reserve=20)
    assert held is not None
    assert (len(held[0]), cache.num_free) == (5, 0)
    assert held[0][:2] == [cache.pools[0].block_of(h) for h in chain]


def test_two_holders_of_one_prefix() -> None:
    cache = manager()
    chain = fill(cache, 2)
    first, second = (cache.start(chain, 12, reserve=12) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first[0][:2] == second[0][:2]
    assert first[0][2] != second[0][2]
    cache.check([first, second])
    cache.release(first)
    cache.check([second])


def test_a_hit_ends_at_the_first_missing_block() -> None:
    cache = manager()
    chain = fill(cache, 4)
    assert cache.match(hashes(6)) == 4
    cache.pools[0].uncache_blocks([cache.pools[0].block_of(chain[1])])
    assert cache.match(hashes(6)) == 1
    assert cache.match([]) == 0


def test_a_hit_is_what_all_groups_can_resume() -> None:
    cache = manager(FULL, MLA)
    chain = fill(cache, 4)
    latent = cache.pools[1]
    latent.uncache_blocks([latent.block_of(chain[2])])
    assert cache.match(chain) == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_group_that_resumes_at_every_second_block_shortens_the_hit(order: tuple[int, int]) -> None:
    both = (FULL, CacheGroup(EverySecond(1, 4, "float32"), 1))
    cache = manager(*(both[i] for i in order))
    chain = fill(cache, 5)
    assert [cache.match(chain[:n]) for n in range(6)] == [0, 0, 2, 2, 4, 4]
    # Five blocks in one group and three in the other: the second says 3, then the first has to agree to 2.
    full = cache.pools[order.index(0)]
    full.uncache_blocks([full.block_of(chain[3])])
    assert cache.match(chain) == 2


def test_a_window_resumes_from_its_last_blocks_alone() -> None:
    window = CacheGroup(ToyKV(1, 8, "float32", 6), 2)
    cache = manager(window, num_blocks=20)
    chain, pool = fill(cache, 6), cache.pools[0]
    for column in (0, 1, 3):
        pool.uncache_blocks([pool.block_of(chain[column])])
    # Position 24 sees those from 19 on, in blocks 4 and 5; 20 sees those from 15 on, and 12 those from 7 on.
    assert [cache.match(chain[:n]) for n in range(7)] == [0, 0, 0, 0, 0, 0, 6]
    held = cache.start(chain, 28, reserve=28)
    assert held is not None
    assert [bool(block) for block in held[0]] == [False] * 4 + [True] * 3
    assert held[0][4:6] == [pool.block_of(digest) for digest in chain[4:]]
    cache.check([held])
    cache.release(held)
    cache.check([])


def test_groups_of_one_pool_have_their_own_blocks_of_equal_content() -> None:
    cache = manager(FULL, CacheGroup(FullKV(1, 8, "float32", 6), 2), num_blocks=20)
    chain = fill(cache, 3)
    assert [pool.num_cached for pool in cache.pools] == [6]
    held = cache.start(chain, 12, reserve=12)
    assert held is not None
    assert not set(held[0]) & set(held[1])
    assert cache.num_free == cache.num_usable - 6


def test_a_window_reserves_no_more_than_it_holds_at_once() -> None:
    cache = manager(CacheGroup(ToyKV(1, 8, "float32", 6), 2), num_blocks=6, max_query=8)
    assert cache.admit([], 8, reserve=1000) is not None
    # 5 tokens of the window and 8 of the step, which may begin inside a block.
    assert manager(CacheGroup(ToyKV(1, 8, "float32", 6), 2), num_blocks=5, max_query=8).admit([], 8, 1000) is None


def test_uncache_and_reset_reach_every_group() -> None:
    cache = manager(FULL, MLA)
    held = cache.start([], 8, reserve=8)
    assert held is not None
    chain = hashes(2)
    cache.cache_blocks(held, 0, chain[:1])
    cache.cache_blocks(held, 1, chain[1:])
    assert [pool.num_cached for pool in cache.pools] == [2, 2]
    cache.uncache_blocks([blocks[1:] for blocks in held])
    assert [pool.has(chain[0]) for pool in cache.pools] == [True, True]
    assert [pool.has(chain[1]) for pool in cache.pools] == [False, False]
    cache.reset_cache()
    assert [pool.num_cached for pool in cache.pools] == [0, 0]


def test_deferred_blocks_are_free_soon_and_hidden_after_a_failure() -> None:
    cache = manager(FULL, MLA)
    held = cache.start([], 8, reserve=8)
    assert held is not None
    chain = hashes(2)
    cache.cache_blocks(held, 0, chain)
    cache.release_after(1, held)
    more = [[], []]
    assert [cache.can_grow(more, n * SIZE) for n in (9, 10)] == [True, False]
    assert [cache.can_grow(more, n * SIZE, soon=True) for n in (11, 12)] == [True, False]
    cache.uncache_deferred()
    assert cache.match(chain) == 0
    cache.collected(1)
    assert cache.can_grow(more, 11 * SIZE)
    cache.check([])


def test_the_check_names_a_leak_in_any_group() -> None:
    cache = manager(FULL, MLA)
    held = cache.start([], 4, reserve=4)
    assert held is not None
    cache.pools[0].release(held[0])
    with pytest.raises(AssertionError):
        cache.check([])
