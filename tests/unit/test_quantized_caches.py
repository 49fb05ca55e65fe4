"""Caches in FP8 and NVFP4 at their operators: what is stored, what is read, and what is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_infer.cache.spec import MLAKV, FullKV, LatentRecord
from rapid_infer.errors import ConfigError
from rapid_infer.layers.attention import Attention
from rapid_infer.layers.context import BuildContext
from rapid_infer.ops import OPS, AttentionParams, OpInfo, OpResolver, load_providers
from rapid_infer.ops.reference.kv_cache import load_heads, load_latents, store_heads, store_latents
from rapid_infer.testing.op_cases import cases_of
from rapid_infer.testing.op_cases.attention import make_metadata

load_providers()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn
BAD = (math.nan, math.inf, -math.inf)


def equal_codes(got: Tensor, expected: Tensor, share: float) -> None:
    """NaN in the same places, and of the others at most `share` is off, by little."""
    assert torch.equal(got.isnan(), expected.isnan())
    differ = got.nan_to_num() != expected.nan_to_num()
    assert differ.float().mean() <= share
    assert (got - expected).nan_to_num().norm() < 0.02 * expected.nan_to_num().norm()


def test_sizes_of_what_is_stored() -> None:
    sizes = [FullKV(8, 128, dtype).bytes_per_token for dtype in ("bfloat16", "float8_e4m3fn", "nvfp4")]
    assert sizes == [4096, 2048, 8 * 2 * 72]
    assert FullKV(8, 128, "nvfp4").layout(3, 5, 16) == (3, 2, 5, 16, 8, 72)
    assert FullKV(8, 128, "nvfp4").element == MLAKV(512, 64, "float8_e4m3fn").element == "uint8"
    # FlashMLA's record has as many bytes.
    assert LatentRecord(512, 64) == LatentRecord(512, 64)
    assert (LatentRecord(512, 64).rope_at, LatentRecord(512, 64).scale_at, LatentRecord(512, 64).width) == (
        512, 640, 656,
    )  # fmt: skip
    assert MLAKV(512, 64, "float8_e4m3fn").bytes_per_token == 656
    # A rank that does not fill words: parts begin where their types may.
    record = LatentRecord(6, 3)
    assert (record.rope_at, record.scale_at, record.width) == (8, 16, 32)


def test_fp8_by_value() -> None:
    scale = torch.tensor([0.5, 4.0])
    x = torch.tensor([1.0, -3.3, 1e4, -1e30, 0.0, *BAD]).repeat(1, 2, 1)
    stored = store_heads(x, E4M3, scale)
    assert stored.dtype == E4M3
    got = load_heads(stored, scale, torch.float32)[0]
    torch.testing.assert_close(got[0, :5], torch.tensor([1.0, -3.25, 224.0, -224.0, 0.0]))
    torch.testing.assert_close(got[1, :5], torch.tensor([1.0, -3.25, 448.0 * 4, -448.0 * 4, 0.0]))
    assert got[:, 5:].isnan().all()


def test_nvfp4_by_loops() -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(3, 2, 32) * torch.tensor([1.0, 30.0])[:, None], torch.tensor([0.01, 1.5])
    x[2, 1, 16:] = 0
    x[0, 0, 3] = math.nan
    stored = store_heads(x, torch.uint8, scale)
    assert stored.shape == (3, 2, 16 + 2)
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    got = load_heads(stored, scale, torch.float32)
    for token in range(3):
        for head in range(2):
            for feature in range(32):
                byte = int(stored[token, head, feature // 2])
                code = byte >> 4 if feature % 2 else byte & 15
                group = float(stored[token, head, 16 + feature // 16 :][:1].view(E4M3).float())
                value = (-1 if code & 8 else 1) * values[code & 7] * group * float(scale[head])
                found, wanted = float(got[token, head, feature]), float(x[token, head, feature])
                if (token, head) == (0, 0) and feature < 16:
                    assert math.isnan(found)
                    continue
                assert found == pytest.approx(value, rel=1e-6)
                # Half of the widest step, and the rounding of the group's scale.
                largest = float(x[token, head, feature // 16 * 16 :][:16].abs().max())
                assert abs(found - wanted) <= largest * (1 / 6 + 1 / 16)


def test_a_latent_has_its_own_scale() -> None:
    torch.manual_seed(0)
    latent, rope = torch.randn(6, 32) * torch.tensor([1.0, 1e-3, 1e5, 0.0, 1.0, 1.0])[:, None], torch.randn(6, 8)
    latent[4, 7], latent[5, 7] = math.inf, math.nan
    entries = store_latents(latent, rope, torch.uint8)
    got = load_latents(entries, 32, 8, torch.float32)
    assert (got[:4, :32] - latent[:4]).norm() <= 0.03 * latent[:4].norm()
    for token in range(3):
        assert (got[token, :32] - latent[token]).norm() <= 0.03 * latent[token].norm()
    assert got[4:, :32].isnan().any(1).all()
    torch.testing.assert_close(got[:, 32:], rope.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [E4M3, torch.uint8])
@pytest.mark.parametrize("provider", ["cpu", "triton"])
def test_a_write_equals_the_reference(provider: str, stored: torch.dtype, dtype: torch.dtype) -> None:
    op = OPS["qk_norm_rope_kv_write"]
    kind = "fp8" if stored == E4M3 else "nvfp4"
    if why_not := op.providers[provider].supports(OpInfo.of(DEVICE, dtype, kv_cache_dtype=kind)):
        pytest.skip("; ".join(why_not))
    torch.manual_seed(0)
    ran = 0
    for case in cases_of(op, dtype, DEVICE):
        blocks, size, kv_heads, dim = case.kwargs["k_cache"].shape
        if stored == torch.uint8 and dim % 16:
            continue
        qkv = case.kwargs["qkv"]
        if stored == E4M3:
            qkv[3, -1], qkv[4, -dim * kv_heads - 1], qkv[5, -2], qkv[6, -3] = math.inf, math.nan, 1e4, -1e30
        scales = torch.rand(2, kv_heads, device=DEVICE) * 0.1
        width = dim if stored == E4M3 else dim // 2 + dim // 16
        caches = {}
        for name in (provider, "torch"):
            caches[name] = torch.zeros(2, blocks, size, kv_heads, width, device=DEVICE).to(stored)
            k_cache, v_cache = caches[name]
            case.kwargs["metadata"].plans.clear()
            given = {**case.kwargs, "k_cache": k_cache, "v_cache": v_cache, "kv_scales": scales}
            op.providers[name].fn(**given)
        got, expected = (
            torch.stack([load_heads(side, scale, torch.float32) for side, scale in zip(cache, scales)])
            for cache in caches.values()
        )
        if stored == E4M3:
            equal_codes(got, expected, 0.01 if dtype == torch.float32 else 0.06)
            assert expected[1].isnan().sum() == 1
        else:
            assert (got - expected).norm() < 0.05 * expected.norm()
        ran += 1
    assert ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_of_latents_equals_the_reference(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    op = OPS["mla_kv_write"]
    torch.manual_seed(0)
    for case in cases_of(op, dtype, DEVICE):
        rank, rope = case.extra["rank"], case.extra["rope_dim"]
        kv = case.kwargs["kv"]
        kv[2, 3], kv[3, 5], kv[4, :rank] = math.nan, math.inf, 0
        read = []
        for name in ("triton", "torch"):
            cache = torch.zeros(5, 4, LatentRecord(rank, rope).width, dtype=torch.uint8, device=DEVICE)
            op.providers[name].fn(**{**case.kwargs, "cache": cache})
            read.append(load_latents(cache, rank, rope, torch.float32))
        equal_codes(*read, share=1.0)
        assert read[1].isnan().any(-1).sum() == 2


@pytest.mark.parametrize("provider", ["torch", "cpu", "triton"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_what_is_not_finite_fails_its_row_alone(provider: str, kind: str) -> None:
    op, stored = OPS["paged_attention"], E4M3 if kind == "fp8" else torch.uint8
    if why_not := op.providers[provider].supports(
        OpInfo.of(DEVICE, torch.float32, kv_cache_dtype=kind, head_dim=16, block_size=4)
    ):
        pytest.skip("; ".join(why_not))
    torch.manual_seed(0)
    metadata, blocks = make_metadata([5, 9, 9, 6], [1, 1, 4, 3], 4, DEVICE)
    scales = torch.ones(2, 2, device=DEVICE)
    k, v = torch.randn(2, blocks, 4, 2, 16, device=DEVICE)
    v[metadata.block_table[1, 0].long(), 1, 0, 3] = math.inf
    k[metadata.block_table[3, 0].long(), 1, 1, 3] = math.nan
    caches = [store_heads(x, stored, scale) for x, scale in zip((k, v), scales)]
    q = torch.randn(9, 4, 16, device=DEVICE)
    out = op.providers[provider].fn(q, *caches, metadata, AttentionParams(0.25, kv_scales=scales))
    assert out.isnan().flatten(1).any(1).tolist() == [False, True] + [False] * 4 + [True] * 3


def test_heads_have_scales_of_their_own() -> None:
    """Values far outside e4m3's range without them, in one head alone."""
    torch.manual_seed(0)
    metadata, blocks = make_metadata([5, 9, 9], [1, 1, 4], 4, "cpu")
    k, v = torch.randn(2, blocks, 4, 2, 16)
    v[..., 0, :] *= 1e6
    q, scales = torch.randn(6, 4, 16), torch.tensor([[0.01, 0.02], [1e4, 0.02]])
    plain = OPS["paged_attention"].reference(q, k, v, metadata, AttentionParams(0.25))
    for name in ("torch", "cpu"):
        metadata.plans.clear()
        given = [store_heads(x, E4M3, scale) for x, scale in zip((k, v), scales)]
        got = OPS["paged_attention"].providers[name].fn(q, *given, metadata, AttentionParams(0.25, kv_scales=scales))
        for heads in (slice(0, 2), slice(2, 4)):
            assert (got - plain)[:, heads].norm() < 0.05 * plain[:, heads].norm()


def test_providers_say_which_caches_they_read() -> None:
    def why(op: str, provider: str, **info: Any) -> str:
        made = OpInfo("cuda", torch.bfloat16, info.pop("capability", (9, 0)), info)
        return "; ".join(OPS[op].providers[provider].reasons(made))

    for op in ("paged_attention", "mla_decode", "qk_norm_rope_kv_write"):
        assert "has no nvfp4 KV cache" in why(op, "triton", kv_cache_dtype="nvfp4")
        assert "KV cache" not in why(op, "triton", kv_cache_dtype="fp8")
        assert "has FP8 on SM 89" in why(op, "triton", kv_cache_dtype="fp8", capability=(8, 0))
    for name in OPS["paged_attention"].providers.keys() - {"torch", "cpu", "triton"}:
        info = {"head_dim": 128, "block_size": 256, "kv_cache_dtype": "fp8"}
        assert "has no fp8 KV cache" in why("paged_attention", name, **info), name


def test_heads_that_nvfp4_cannot_hold_are_refused() -> None:
    ctx = BuildContext(torch.float32, OpResolver("cpu"), 64, name="attn", block_size=4, kv_cache_dtype="nvfp4")
    with pytest.raises(ConfigError, match="attn: kv_cache_dtype='nvfp4' takes heads of a multiple of 16 features"):
        Attention(ctx, 2, 1, 24, rope=None)
