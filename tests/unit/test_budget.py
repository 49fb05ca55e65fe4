"""Bytes of the caches and what fits, with the published models' numbers."""

from collections.abc import Sequence

import pytest
from fake_executor import ToyState

from rapid_infer.cache.budget import GIB, CacheDemand, CachePlan, fit_model_len, plan_blocks
from rapid_infer.cache.manager import CacheManager
from rapid_infer.cache.pools import divide_layers, shared_pools
from rapid_infer.cache.spec import MLAKV, CacheGroup, CacheSpec, FullKV, blocks_for
from rapid_infer.errors import ConfigError

GROUPS = {
    "Qwen3-0.6B": (CacheGroup(FullKV(8, 128, "bfloat16"), 28), 114688),
    "Qwen3-8B": (CacheGroup(FullKV(8, 128, "bfloat16"), 36), 147456),
    "Qwen3-30B-A3B": (CacheGroup(FullKV(4, 128, "bfloat16"), 48), 98304),
    "DeepSeek-V2-Lite": (CacheGroup(MLAKV(512, 64, "bfloat16"), 27), 31104),
    "DeepSeek-V3": (CacheGroup(MLAKV(512, 64, "bfloat16"), 61), 70272),
}


def plan_of(blocks: int) -> CachePlan:
    group = CacheGroup(FullKV(1, 1, "float32"), 1)
    return plan([group], blocks * group.page_bytes(16))


def plan(groups: Sequence[CacheGroup], budget: int, max_len: int = 4096, rows: int = 256) -> CachePlan:
    return plan_blocks(CacheDemand(groups, 16, 8192, rows), budget, max_len)


@pytest.mark.parametrize("name", GROUPS)
def test_bytes_per_token(name: str) -> None:
    group, expected = GROUPS[name]
    assert group.bytes_per_token() == expected
    assert group.page_bytes(16) == 16 * expected


@pytest.mark.parametrize("name", GROUPS)
def test_the_layout_holds_exactly_those_bytes(name: str) -> None:
    group, per_token = GROUPS[name]
    elements = 1
    for size in group.spec.layout(group.layers, 3, 16):
        elements *= size
    assert elements * 2 == 3 * 16 * per_token


def test_the_latent_costs_far_less_than_materialised_heads() -> None:
    heads = 16 * (192 + 128) * 27 * 2
    assert heads == 276480
    assert heads / GROUPS["DeepSeek-V2-Lite"][0].bytes_per_token() == pytest.approx(8.9, abs=0.05)


def test_equal_specs_are_one_group_and_a_window_makes_another() -> None:
    assert FullKV(8, 128, "bfloat16") == FullKV(8, 128, "bfloat16")
    assert len({FullKV(8, 128, "bfloat16"), FullKV(8, 128, "bfloat16", 512), FullKV(8, 128, "float16")}) == 3


def test_element_sizes() -> None:
    sizes = [FullKV(1, 1, dtype).bytes_per_token for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn")]
    assert sizes == [8, 4, 4, 2]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_as_many_blocks_as_the_budget_holds() -> None:
    group, per_token = GROUPS["Qwen3-0.6B"]
    made = plan([group], 16 * per_token * 10 + 5)
    assert (made.num_blocks, made.num_tokens, made.total_bytes) == ((10,), 9 * 16, 160 * per_token)
    assert plan([group], -1).num_blocks == (0,)


def test_several_groups_share_the_budget_block_by_block() -> None:
    groups = [GROUPS["Qwen3-0.6B"][0], GROUPS["DeepSeek-V2-Lite"][0]]
    made = plan(groups, 4 * GIB)
    assert made.bytes_per_block == 16 * (114688 + 31104)
    assert made.num_blocks == (4 * GIB // made.bytes_per_block,) * 2


def test_the_plan_prints_its_arithmetic() -> None:
    assert str(plan([GROUPS["Qwen3-0.6B"][0]], 1025 * 16 * 114688)) == (
        "KV cache: 1025 blocks x 16 tokens x 114688 bytes/token in bfloat16 = 1.75 GiB (16384 tokens)"
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
def test_a_pool_that_just_holds_one_request(length: int) -> None:
    blocks = blocks_for(length, 16) + 1
    assert fit_model_len(plan_of(blocks), length, shrink=False) == length
    with pytest.raises(ConfigError):
        fit_model_len(plan_of(blocks - 1), length, shrink=False)


def test_a_pool_too_small_for_one_request_is_an_error_with_the_arithmetic() -> None:
    made = plan([GROUPS["Qwen3-8B"][0]], 100 * 16 * 147456)
    with pytest.raises(ConfigError) as error:
        fit_model_len(made, 4096, shrink=False)
    assert str(error.value) == (
        "the KV cache is too small for one request of max_model_len=4096: it needs 257 blocks of 16 tokens x 2359296 "
        "bytes = 606339072 bytes, and has 235929600 bytes = 100 blocks; lower max_model_len or raise "
        "kv_cache_memory_bytes"
    )


def test_an_automatic_length_shrinks_to_what_fits_but_not_to_nothing() -> None:
    assert fit_model_len(plan_of(100), 4096, shrink=True) == 99 * 16
    for blocks in (0, 1):
        with pytest.raises(ConfigError, match="too small"):
            fit_model_len(plan_of(blocks), 4096, shrink=True)


FULL_LAYERS, WINDOW_LAYERS = FullKV(16, 128, "bfloat16"), FullKV(16, 128, "bfloat16", 1024)


def groups_of(layers: dict[CacheSpec, int]) -> list[CacheGroup]:
    return [CacheGroup(spec, n) for spec, sizes in divide_layers(layers).items() for n in sizes]


@pytest.mark.parametrize(
    ("full", "window", "sizes"),
    [
        (36, 0, ([36], [])),
        (0, 36, ([], [36])),
        (12, 12, ([12], [12])),
        (4, 22, ([4], [4, 4, 4, 4, 3, 3])),
        (10, 52, ([10], [9, 9, 9, 9, 8, 8])),
        (1, 30, ([1], [5, 5, 5, 5, 5, 5])),
    ],
)
def test_layers_form_groups_of_about_equal_height(full: int, window: int, sizes: tuple[list[int], list[int]]) -> None:
    layers = {spec: n for spec, n in ((FULL_LAYERS, full), (WINDOW_LAYERS, window)) if n}
    made = divide_layers(layers)
    assert (made.get(FULL_LAYERS, []), made.get(WINDOW_LAYERS, [])) == sizes
    assert len(shared_pools(groups_of(layers))) == 1


def test_other_heads_are_groups_and_pools_of_their_own() -> None:
    latents = {MLAKV(512, 64, "bfloat16"): 3, MLAKV(256, 64, "bfloat16"): 2}
    made = divide_layers({FULL_LAYERS: 10, FullKV(8, 128, "bfloat16", 1024): 52, **latents})
    assert list(made.values()) == [[10], [52], [3], [2]]
    assert len(shared_pools([CacheGroup(spec, n) for spec, (n,) in made.items()])) == 4


def test_windows_leave_room_for_five_times_the_tokens() -> None:
    """Five layers with a window of 1024 to each full one, as Gemma 3 has them, and requests of 128k tokens."""
    length, budget, chunk, size = 131072, 80 * GIB, 8192, 16
    groups = groups_of({FULL_LAYERS: 10, WINDOW_LAYERS: 50})
    alike = [CacheGroup(FULL_LAYERS, 60)]
    without = plan(alike, budget, length)
    with_windows = plan(groups, budget, length)
    assert with_windows.total_bytes <= budget
    assert (without.num_tokens, with_windows.num_tokens) == (174736, 1001056)
    assert with_windows.num_tokens > 5 * without.num_tokens

    def requests(made: CachePlan, groups: list[CacheGroup]) -> int:
        """How many such requests are held at once, each one computed chunk by chunk."""
        cache = CacheManager(groups, made.num_blocks, size, chunk)
        step = 0
        for count in range(100):
            blocks = cache.admit([], chunk, reserve=length)
            if blocks is None:
                return count
            for start in range(0, length, chunk):
                cache.trim(blocks, start, step)
                step += 1
                cache.grow(blocks, start + chunk, step)
                cache.collected(step)
            cache.trim(blocks, length, step)
            cache.check([blocks]) if not count else None
        raise AssertionError("no end")

    assert (requests(without, alike), requests(with_windows, groups)) == (1, 7)


def test_a_pool_of_windows_alone_takes_no_more_than_all_rows_hold() -> None:
    groups = [CacheGroup(FULL_LAYERS, 10), CacheGroup(FullKV(8, 128, "bfloat16", 1024), 50)]
    made = plan(groups, 200 * GIB, 131072, rows=16)
    full, window = made.num_blocks
    # 1024 - 1 tokens of the window, 256 - 1 read beside it and 8192 of a step, which may begin inside a block.
    assert window == 16 * ((1023 + 255 + 8192 + 15) // 16 + 1) + 1
    assert full > 5 * window
    assert 200 * GIB - made.bytes_per_block < made.total_bytes <= 200 * GIB
    # Short requests hold as many blocks of one as of the other.
    assert plan(groups, 8 * GIB, 131072).num_blocks == (8 * GIB // made.bytes_per_block,) * 2


def test_states_are_counted_by_rows_and_not_by_tokens() -> None:
    groups = [CacheGroup(ToyState(), 1), CacheGroup(FULL_LAYERS, 10)]
    for rows in (4, 64):
        states, blocks = plan(groups, GIB, 4096, rows).num_blocks
        assert states == 2 * rows + 1
        assert blocks == (GIB - 4 * states) // groups[1].page_bytes(16)
