"""The floor of a workload against sums by hand."""

import pytest
from common.floor import DenseModel, Peak, floor_seconds
from common.workloads import named, spec

# 2 layers of 4 * (8 + 4 + 3 * 6) weights, a head of 4 * 10; a token's cache is 2 * 1 * 2 * 4 bytes.
SMALL = DenseModel(layers=2, hidden=4, intermediate=6, heads=2, kv_heads=1, head_dim=2, vocab=10)


def test_sizes() -> None:
    assert (SMALL.layer_weights, SMALL.head_weights, SMALL.cache_bytes) == (120, 40, 16)


def test_decode_is_bound_by_bytes() -> None:
    requests = [([1, 2, 3], 3)]
    steps = [2 * (240 + 40) + 16 * (3 + done) for done in (1, 2)]
    assert floor_seconds(SMALL, requests, Peak(1.0, 1e12)) == pytest.approx(sum(steps), rel=1e-6)


def test_prompts_are_bound_by_operations_and_a_shared_prefix_counts_once() -> None:
    def operations(tokens: int, keys: int) -> int:
        return 2 * 240 * tokens + 2 * 2 * 2 * 4 * keys + 2 * 40

    alone = floor_seconds(SMALL, [([1, 2, 3, 4], 1)], Peak(1e12, 1.0))
    assert alone == operations(4, 8)
    both = floor_seconds(SMALL, [([1, 2, 3, 4], 1), ([1, 2, 3, 5], 1)], Peak(1e12, 1.0))
    assert both == operations(4, 8) + operations(1, 3)


def test_a_model_with_experts_has_no_such_floor() -> None:
    assert DenseModel.read(spec()["models"]["qwen3-30b-a3b"]) is None


def test_single_stream_of_the_fixed_model() -> None:
    model = DenseModel.read(spec()["models"]["qwen3-8b"])
    assert model is not None
    seconds = floor_seconds(model, named("latency-b1").requests(151936), Peak(4.3e12, 780e12))
    assert 256 / seconds == pytest.approx(284, abs=1)
