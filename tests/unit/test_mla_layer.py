"""MLA against its formula with keys and values of every head, cut over ranks, and YaRN's score factor."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.errors import ConfigError
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.mla import LATENT_EPS, MLAAttention, MLAConfig
from rapid_infer.layers.parameter import parts_of, placement_of
from rapid_infer.layers.rope import RopeConfig
from rapid_infer.ops import OPS, OpResolver
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.reference.rope_kv_write import rotate
from rapid_infer.parallel import ParallelState
from rapid_infer.testing.op_cases.attention import in_mixed_graph, make_metadata
from rapid_infer.testing.simulated_ranks import run_ranks

HEADS, NOPE, ROPE, V, RANK, HIDDEN, BLOCK = 4, 6, 4, 5, 12, 16, 4
YARN = (("factor", 40.0), ("mscale_all_dim", 0.707), ("mscale", 0.707), ("original_max_position_embeddings", 8.0))
CONFIG = MLAConfig(HIDDEN, HEADS, None, RANK, NOPE, ROPE, V, RopeConfig(1e4, ROPE, "yarn", YARN, True))


@cache
def weights(config: MLAConfig) -> dict[tuple[str, str | None], Tensor]:
    torch.manual_seed(0)
    q_rank = config.q_lora_rank
    made: dict[tuple[str, str | None], Tensor] = {
        ("qkv_a_proj", "kv_a"): torch.randn(RANK + ROPE, HIDDEN),
        ("kv_a_layernorm", None): 1 + torch.randn(RANK) / 4,
        ("kv_b_proj", None): torch.randn(HEADS * (NOPE + V), RANK) / 3,
        ("o_proj", None): torch.randn(HIDDEN, HEADS * V),
    }
    if q_rank is None:
        return made | {("qkv_a_proj", "q"): torch.randn(HEADS * (NOPE + ROPE), HIDDEN) / 4}
    return made | {
        ("qkv_a_proj", "q_a"): torch.randn(q_rank, HIDDEN),
        ("q_a_layernorm", None): 1 + torch.randn(q_rank) / 4,
        ("q_b_proj", None): torch.randn(HEADS * (NOPE + ROPE), q_rank) / 3,
    }


def build(config: MLAConfig, parallel: ParallelState, blocks: int, provider: str | None = None) -> MLAAttention:
    """`provider`: of the ops that have it; None: the best of each."""
    preferred = {name: [provider] for name, op in OPS.items() if provider in op.providers}
    ctx = BuildContext(torch.float32, OpResolver("cpu", preferred), 64, parallel, name="attn", block_size=BLOCK)
    layer = MLAAttention(ctx, config)
    for (name, part), tensor in weights(config).items():
        module = layer.get_submodule(name)
        assert part in parts_of(module, "weight")
        place = placement_of(module, "weight", part)
        assert place is not None
        assert place.shape == tuple(tensor.shape)
        place.param.data[place.target] = tensor[place.source]
    layer.kv_b_proj.finalize_weights()
    layer.bind_cache(0, torch.full((blocks, BLOCK, RANK + ROPE), math.nan))
    return layer


def materialised(config: MLAConfig, x: Tensor) -> Tensor:
    """The published formula: keys and values of every head, and a causal softmax over them."""
    w = weights(config)

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(t, t.shape[-1:], weight, LATENT_EPS)

    if config.q_lora_rank is None:
        q = x @ w["qkv_a_proj", "q"].T
    else:
        q = norm(x @ w["qkv_a_proj", "q_a"].T, w["q_a_layernorm", None]) @ w["q_b_proj", None].T
    latent, key = (x @ w["qkv_a_proj", "kv_a"].T).split((RANK, ROPE), dim=1)
    kv = (norm(latent, w["kv_a_layernorm", None]) @ w["kv_b_proj", None].T).view(-1, HEADS, NOPE + V)
    frequencies, factor = config.rope.inverse_frequencies()
    angle = torch.outer(torch.arange(len(x)).float(), frequencies)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    q = q.view(-1, HEADS, NOPE + ROPE)
    q = torch.cat((q[..., :NOPE], rotate(q[..., NOPE:], cos, sin, True)), -1)
    shared = rotate(key.unsqueeze(1), cos, sin, True).expand(-1, HEADS, -1)
    k = torch.cat((kv[..., :NOPE], shared), -1)
    mscale = 0.1 * 0.707 * math.log(40) + 1
    scores = torch.einsum("qhd,khd->hqk", q, k) * (NOPE + ROPE) ** -0.5 * mscale**2
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[..., NOPE:])
    return out.flatten(1) @ w["o_proj", None].T


@pytest.mark.parametrize("q_rank", [None, 7])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("chunks", [[11], [4, 7], [1] * 11, [8, 1, 1, 1], [5, 3, 3]])
def test_absorbed_equals_materialised_in_chunks_and_over_ranks(q_rank: int | None, tp: int, chunks: list[int]) -> None:
    """Later chunks see the earlier ones through the cache alone, as with a cached prefix."""
    config = replace(CONFIG, q_lora_rank=q_rank)
    x = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(1))
    metadata, blocks = make_metadata([11], [11], BLOCK, "cpu")

    def run(parallel: ParallelState) -> tuple[Tensor, Tensor]:
        layer = build(config, parallel, blocks)
        results, done = [], 0
        for size in chunks:
            positions = torch.arange(done, done + size)
            step = replace(
                metadata,
                query_start=torch.tensor([0, size], dtype=torch.int32),
                seq_lens=torch.tensor([done + size], dtype=torch.int32),
                slots=metadata.slots[done : done + size],
                num_decodes=int(size == 1),
                plans={},
            )
            results.append(layer(x[done : done + size], ForwardBatch(positions, positions, [step])))
            done += size
        assert tp == 1 or parallel.comm.sums == len(chunks)
        return torch.cat(results), layer.cache.nan_to_num()

    # Drawn here, not in several threads at once.
    weights(config)
    (result, latents), *others = run_ranks(tp, run)
    torch.testing.assert_close(result, materialised(config, x), atol=2e-4, rtol=2e-4)
    assert all(torch.equal(result, theirs) and torch.equal(latents, copy) for theirs, copy in others)


@pytest.mark.parametrize("padding", [(0, 0), (3, 5)])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([9, 4], [9, 4]),
        ([30, 1, 9, 2], [1, 1, 9, 2]),
        ([12, 11], [7, 11]),
        ([1, 6, 9], [1, 1, 1]),
        ([1, 30, 9, 2], [1, 1, 3, 2]),
        ([17, 6, 8, 20], [1, 6, 8, 2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_mixed_graph_needs_no_number_from_the_host(
    seq_lens: list[int], query_lens: list[int], padding: tuple[int, int], provider: str
) -> None:
    """Prompts with and without what was computed before, rows alone, and chunks of one token, which count as alone.

    Slots of padding are those of a block that belongs to nobody, and holds NaN.
    """
    if provider == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter runs where there is no GPU")
    metadata, blocks = make_metadata(seq_lens, query_lens, BLOCK, "cpu")
    tokens, generator = sum(query_lens), torch.Generator().manual_seed(1)
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(seq_lens, query_lens)])
    x, cache = (torch.randn(*shape, generator=generator) for shape in ((tokens, HIDDEN), (blocks, BLOCK, RANK + ROPE)))
    layer = build(CONFIG, ParallelState(), blocks, provider)

    def run(metadata: AttentionMetadata, spare: int) -> Tensor:
        layer.cache.copy_(cache)
        layer.cache[0] = math.nan
        ids = F.pad(positions, (0, spare))
        return layer(F.pad(x, (0, 0, 0, spare), value=math.nan), ForwardBatch(ids, ids, [metadata]))[:tokens]

    expected = run(metadata, 0)
    written = layer.cache.clone()
    fresh = all(n == q for n, q in zip(seq_lens, query_lens) if q > 1)
    for without in (None, 0) if fresh else (None,):
        torch.testing.assert_close(run(replace(metadata, max_context_len=without, plans={}), 0), expected)
    for without in (None, 0) if fresh else (None,):
        graph = replace(in_mixed_graph(metadata, *padding), max_context_len=without)
        torch.testing.assert_close(run(graph, padding[1]), expected)
        torch.testing.assert_close(layer.cache[1:], written[1:])


def test_what_does_not_belong_to_a_head_is_whole_on_every_rank() -> None:
    layer = build(replace(CONFIG, q_lora_rank=7), ParallelState(1, 4), 1)
    assert layer.qkv_a_proj.weight.shape == (7 + RANK + ROPE, HIDDEN)
    assert layer.q_b_proj is not None
    assert layer.q_b_proj.weight.shape == (NOPE + ROPE, 7)
    assert layer.kv_b_proj.weight.shape == (NOPE + V, RANK)
    assert layer.o_proj.weight.shape == (HIDDEN, V)
    assert layer.cache_spec.bytes_per_token == (RANK + ROPE) * 4
    plain = build(CONFIG, ParallelState(1, 4), 1)
    assert plain.qkv_a_proj.weight.shape == (NOPE + ROPE + RANK + ROPE, HIDDEN)
    with pytest.raises(ConfigError, match="num_attention_heads=4"):
        build(CONFIG, ParallelState(1, 3), 1)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "on_cos_sin", "on_scores"),
    [
        (0.707, 0.707, 1.0, 1.589626),
        (1.0, 1.0, 1.0, 1.873854),
        (1.0, 0.5, 1.368888 / 1.184444, 1.402907),
        (None, None, 1.368888, 1.0),
    ],
)
def test_yarn_factors_by_hand(mscale: float | None, all_dim: float | None, on_cos_sin: float, on_scores: float) -> None:
    """At a factor of 40: `0.1 m ln 40 + 1` is 1.260804 for m = 0.707, 1.368888 for 1 and 1.184444 for 0.5."""
    given = {"rope_type": "yarn", "factor": 40, "mscale": mscale, "mscale_all_dim": all_dim}
    rope = RopeConfig.read({k: v for k, v in given.items() if v is not None}, 64, 4096, True)
    assert rope.inverse_frequencies()[1] == pytest.approx(on_cos_sin, rel=1e-5)
    assert rope.score_factor == pytest.approx(on_scores, rel=1e-5)
    config = MLAConfig(2048, 16, None, 512, 128, 64, 128, rope)
    assert config.scale == pytest.approx(192**-0.5 * on_scores, rel=1e-5)


def test_other_ropes_leave_the_scores_alone() -> None:
    assert RopeConfig(1e4, 64).score_factor == 1.0
    assert RopeConfig.read({"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}, 64, 99).score_factor == 1.0
