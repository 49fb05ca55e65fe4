"""The references themselves against naive formulas: loops, and complex numbers for rotation."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from rapid_infer.ops import fused_add_rms_norm, paged_attention, qk_norm_rope_kv_write, rms_norm, silu_and_mul
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.ops.reference.rope_kv_write import rotate
from rapid_infer.testing.op_cases.attention import make_metadata, slots_only

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 8, 4


def one_query(
    q: list[float], keys: Tensor, values: Tensor, scale: float, soft_cap: float | None, sink: float | None
) -> tuple[list[float], float]:
    """Attention of one query of one head by the definition; also the logarithm of its denominator."""
    scores = [scale * sum(a * b for a, b in zip(q, key)) for key in keys.tolist()]
    if soft_cap is not None:
        scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
    total = sum(math.exp(score) for score in scores) + (0.0 if sink is None else math.exp(sink))
    weights = [math.exp(score) / total for score in scores]
    out = [sum(w * v for w, v in zip(weights, column)) for column in zip(*values.tolist())]
    return out, math.log(total)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_paged_attention_by_loops(window: int | None, soft_cap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(1)
    seq_lens, query_lens = [6, 1, 9], [1, 1, 4]
    dense = [(torch.randn(n, KV_HEADS, DIM), torch.randn(n, KV_HEADS, DIM)) for n in seq_lens]
    metadata, blocks = make_metadata(seq_lens, query_lens, SIZE, "cpu")
    k_cache, v_cache = (torch.full((blocks, SIZE, KV_HEADS, DIM), math.nan) for _ in range(2))
    for row, (keys, values) in enumerate(dense):
        for i in range(len(keys)):
            block = int(metadata.block_table[row, i // SIZE])
            k_cache[block, i % SIZE], v_cache[block, i % SIZE] = keys[i], values[i]
    q, sinks = torch.randn(sum(query_lens), HEADS, DIM), torch.randn(HEADS) if with_sinks else None

    out, lse = paged_attention(q, k_cache, v_cache, metadata, AttentionParams(0.3, window, soft_cap, sinks, True))

    token = 0
    for (keys, values), n, m in zip(dense, seq_lens, query_lens):
        for j in range(m):
            stop = n - m + j + 1
            start = 0 if window is None else max(0, stop - window)
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                sink = None if sinks is None else float(sinks[head])
                want, want_lse = one_query(
                    q[token, head].tolist(), keys[start:stop, kv], values[start:stop, kv], 0.3, soft_cap, sink
                )
                torch.testing.assert_close(out[token, head], torch.tensor(want), atol=1e-5, rtol=1e-5)
                assert float(lse[token, head]) == pytest.approx(want_lse, abs=1e-5)
            token += 1


def test_attention_reads_only_the_rows_that_take_part() -> None:
    torch.manual_seed(2)
    metadata, blocks = make_metadata([5, 7], [1, 1], SIZE, "cpu")
    k, v = (torch.randn(blocks, SIZE, KV_HEADS, DIM) for _ in range(2))
    q = torch.randn(2, HEADS, DIM)
    both = paged_attention(q, k, v, metadata, AttentionParams(0.3))
    metadata.rows, metadata.seq_lens = torch.tensor([1]), torch.tensor([7], dtype=torch.int32)
    metadata.query_start = torch.tensor([0, 1], dtype=torch.int32)
    alone = paged_attention(q[1:], k, v, metadata, AttentionParams(0.3))
    torch.testing.assert_close(alone, both[1:])


def turned(a: float, b: float, angle: float) -> tuple[float, float]:
    z = complex(a, b) * cmath.exp(1j * angle)
    return z.real, z.imag


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rotation_by_complex_numbers(interleaved: bool, rotary: int) -> None:
    torch.manual_seed(3)
    x, angle = torch.randn(5, 2, 8), torch.rand(5, rotary // 2) * 6
    got = rotate(x, angle.cos(), angle.sin(), interleaved)
    for token in range(5):
        for head in range(2):
            want = x[token, head].tolist()
            for i in range(rotary // 2):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary // 2)
                want[first], want[second] = turned(want[first], want[second], float(angle[token, i]))
            torch.testing.assert_close(got[token, head], torch.tensor(want), atol=1e-5, rtol=1e-5)


def test_rotated_products_depend_on_the_distance_only() -> None:
    torch.manual_seed(4)
    q, k, frequency = torch.randn(1, 1, 8), torch.randn(1, 1, 8), torch.tensor([1.0, 0.5, 0.1, 0.01])

    def product(i: int, j: int) -> float:
        a, b = (rotate(x, (n * frequency).cos()[None], (n * frequency).sin()[None], False) for x, n in ((q, i), (k, j)))
        return float((a * b).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)


def naive_norm(row: list[float], weight: list[float], eps: float) -> list[float]:
    root = math.sqrt(sum(x * x for x in row) / len(row) + eps)
    return [x / root * w for x, w in zip(row, weight)]


def test_rms_norm_by_its_formula() -> None:
    torch.manual_seed(5)
    x, weight, residual = torch.randn(3, 7), torch.randn(7), torch.randn(3, 7)
    want = [naive_norm(row, weight.tolist(), 0.1) for row in x.tolist()]
    torch.testing.assert_close(rms_norm(x, weight, 0.1), torch.tensor(want), atol=1e-6, rtol=1e-5)
    want = [naive_norm(row, weight.tolist(), 0.1) for row in (x + residual).tolist()]
    normed, total = fused_add_rms_norm(x, residual, weight, 0.1)
    torch.testing.assert_close(normed, torch.tensor(want), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(total, x + residual)


def test_rms_norm_squares_in_fp32() -> None:
    x = torch.full((1, 64), 3e3, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_silu_and_mul_by_its_formula() -> None:
    gate, up = [-2.0, 0.0, 3.0], [0.5, 4.0, -1.0]
    want = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)]
    torch.testing.assert_close(silu_and_mul(torch.tensor([gate + up])), torch.tensor([want]))


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    torch.manual_seed(6)
    tokens, blocks = 3, 4
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    positions, slots = torch.tensor([0, 5, 2]), torch.tensor([9, 4, 14])
    angle = torch.rand(6, DIM // 2)
    table = torch.cat((angle.cos(), angle.sin()), -1)
    k_weight = torch.randn(DIM)
    k_cache, v_cache = (torch.zeros(blocks, SIZE, KV_HEADS, DIM) for _ in range(2))
    q = qk_norm_rope_kv_write(qkv, positions, table, slots_only(slots), k_cache, v_cache, None, k_weight, 1e-6, False)
    heads = qkv.view(tokens, -1, DIM)
    cos, sin = angle.cos()[positions], angle.sin()[positions]
    torch.testing.assert_close(q, rotate(heads[:, :HEADS], cos, sin, False))
    keys = rotate(rms_norm(heads[:, HEADS : HEADS + KV_HEADS], k_weight, 1e-6), cos, sin, False)
    for i, slot in enumerate(slots.tolist()):
        torch.testing.assert_close(k_cache[slot // SIZE, slot % SIZE], keys[i])
        torch.testing.assert_close(v_cache[slot // SIZE, slot % SIZE], heads[i, HEADS + KV_HEADS :])
    untouched = torch.ones(blocks * SIZE, dtype=torch.bool)
    untouched[slots] = False
    for cache in (k_cache, v_cache):
        assert not cache.view(blocks * SIZE, -1)[untouched].any()
