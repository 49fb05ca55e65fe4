"""Bytes of the caches and what fits, with the published models' numbers."""

import pytest

from rapid_infer.cache.budget import GIB, CachePlan, fit_model_len, plan_blocks
from rapid_infer.cache.spec import CacheGroup, FullKV, LatentKV, blocks_for
from rapid_infer.errors import ConfigError

GROUPS = {
    "Qwen3-0.6B": (CacheGroup(FullKV(8, 128, "bfloat16"), 28), 114688),
    "Qwen3-8B": (CacheGroup(FullKV(8, 128, "bfloat16"), 36), 147456),
    "Qwen3-30B-A3B": (CacheGroup(FullKV(4, 128, "bfloat16"), 48), 98304),
    "DeepSeek-V2-Lite": (CacheGroup(LatentKV(512, 64, "bfloat16"), 27), 31104),
    "DeepSeek-V3": (CacheGroup(LatentKV(512, 64, "bfloat16"), 61), 70272),
}


def plan_of(blocks: int) -> CachePlan:
    group = CacheGroup(FullKV(1, 1, "float32"), 1)
    return plan_blocks([group], 16, blocks * group.page_bytes(16))


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
    plan = plan_blocks([group], 16, 16 * per_token * 10 + 5)
    assert (plan.num_blocks, plan.num_tokens, plan.total_bytes) == (10, 9 * 16, 160 * per_token)
    assert plan_blocks([group], 16, -1).num_blocks == 0


def test_several_groups_share_the_budget_block_by_block() -> None:
    groups = [GROUPS["Qwen3-0.6B"][0], GROUPS["DeepSeek-V2-Lite"][0]]
    plan = plan_blocks(groups, 16, 4 * GIB)
    assert plan.bytes_per_block == 16 * (114688 + 31104)
    assert plan.num_blocks == 4 * GIB // plan.bytes_per_block


def test_the_plan_prints_its_arithmetic() -> None:
    assert str(plan_blocks([GROUPS["Qwen3-0.6B"][0]], 16, 1025 * 16 * 114688)) == (
        "KV cache: 1025 blocks x 16 tokens x 114688 bytes/token = 1.75 GiB (16384 tokens)"
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
def test_a_pool_that_just_holds_one_request(length: int) -> None:
    blocks = blocks_for(length, 16) + 1
    assert fit_model_len(plan_of(blocks), length, shrink=False) == length
    with pytest.raises(ConfigError):
        fit_model_len(plan_of(blocks - 1), length, shrink=False)


def test_a_pool_too_small_for_one_request_is_an_error_with_the_arithmetic() -> None:
    plan = plan_blocks([GROUPS["Qwen3-8B"][0]], 16, 100 * 16 * 147456)
    with pytest.raises(ConfigError) as error:
        fit_model_len(plan, 4096, shrink=False)
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
