"""How layers cut their parameters over ranks, and that the ranks' parts add up to the whole."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.embedding import LMHead, VocabEmbedding
from rapid_infer.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from rapid_infer.layers.mlp import GatedMLP
from rapid_infer.layers.norm import RMSNorm
from rapid_infer.layers.parameter import Part, placement_of
from rapid_infer.layers.stack import LayerStack
from rapid_infer.ops import OpResolver
from rapid_infer.parallel import ParallelState
from rapid_infer.parallel.partial_sum import PartialSum, reduced
from rapid_infer.quant import PlainScheme
from rapid_infer.testing.simulated_ranks import run_ranks

OPS = OpResolver("cpu")
SIZES = (1, 2, 4, 8)


def context(parallel: ParallelState, quant: PlainScheme | None = None) -> BuildContext:
    return BuildContext(torch.float32, OPS, 64, parallel, quant or PlainScheme(), "layer")


def contexts(tp_size: int, quant: PlainScheme | None = None) -> list[BuildContext]:
    return [context(ParallelState(rank, tp_size), quant) for rank in range(tp_size)]


def fill(module: nn.Module, tensors: Mapping[tuple[str, Part], Tensor]) -> None:
    """What a loader does. Everything starts as NaN, so that an unfilled place shows."""
    for param in module.parameters(recurse=False):
        param.data.fill_(torch.nan)
    for (leaf, part), tensor in tensors.items():
        place = placement_of(module, leaf, part)
        assert place is not None
        assert tuple(tensor.shape) == place.shape
        place.param.data[place.target] = tensor[place.source]
    if isinstance(module, (Linear, LMHead)):
        module.finalize_weights()
    assert not any(param.isnan().any() for param in module.parameters(recurse=False))


def numbered(rows: int, columns: int, start: int = 0) -> Tensor:
    """Row i holds start + i everywhere."""
    return (torch.arange(rows, dtype=torch.float32) + start).unsqueeze(1).expand(rows, columns).clone()


def rows_of(weight: Tensor) -> list[int]:
    return [int(x) for x in weight[:, 0]]


@pytest.mark.parametrize("tp", SIZES)
def test_column_layers_cut_output_rows_and_bias(tp: int) -> None:
    for rank, ctx in enumerate(contexts(tp)):
        layer = ColumnParallelLinear(ctx, 3, 16, bias=True)
        fill(layer, {("weight", None): numbered(16, 3), ("bias", None): torch.arange(16.0)})
        expected = list(range(rank * 16 // tp, (rank + 1) * 16 // tp))
        assert rows_of(layer.weight) == expected
        assert layer.bias is not None
        assert layer.bias.tolist() == expected


@pytest.mark.parametrize("tp", SIZES)
def test_merged_columns_hold_their_share_of_each_part(tp: int) -> None:
    for rank, ctx in enumerate(contexts(tp)):
        layer = MergedColumnParallelLinear(ctx, 3, [16, 8], bias=True)
        fill(
            layer,
            {
                ("weight", 0): numbered(16, 3),
                ("weight", 1): numbered(8, 3, 100),
                ("bias", 0): torch.arange(16.0),
                ("bias", 1): torch.arange(100.0, 108.0),
            },
        )
        first = list(range(rank * 16 // tp, (rank + 1) * 16 // tp))
        second = [100 + i for i in range(rank * 8 // tp, (rank + 1) * 8 // tp)]
        assert rows_of(layer.weight) == first + second
        assert layer.bias is not None
        assert layer.bias.tolist() == first + second


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_qkv_is_cut_by_heads_and_kv_heads_repeat_on_more_ranks_than_heads(tp: int, kv_heads: int) -> None:
    heads, dim = 8, 2
    for rank, ctx in enumerate(contexts(tp)):
        layer = QKVParallelLinear(ctx, 3, heads, kv_heads, dim, bias=True)
        tensors: dict[tuple[str, Part], Tensor] = {}
        for part, n, start in (("q", heads, 0), ("k", kv_heads, 1000), ("v", kv_heads, 2000)):
            tensors["weight", part] = numbered(n * dim, 3, start)
            tensors["bias", part] = torch.arange(n * dim) + float(start)
        fill(layer, tensors)
        if tp > kv_heads:
            mine = [rank // (tp // kv_heads)]
        else:
            mine = list(range(rank * kv_heads // tp, (rank + 1) * kv_heads // tp))
        kv_rows = [head * dim + i for head in mine for i in range(dim)]
        q_rows = list(range(rank * heads * dim // tp, (rank + 1) * heads * dim // tp))
        expected = [*q_rows, *(1000 + r for r in kv_rows), *(2000 + r for r in kv_rows)]
        assert rows_of(layer.weight) == expected
        assert layer.bias is not None
        assert layer.bias.tolist() == expected
        assert (layer.num_heads, layer.num_kv_heads) == (heads // tp, len(mine))
        group = heads // kv_heads
        assert {head // group for head in range(rank * heads // tp, (rank + 1) * heads // tp)} == set(mine)


@pytest.mark.parametrize("tp", SIZES)
def test_row_layers_add_up_to_the_whole_with_the_bias_once(tp: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(5, 16), torch.randn(5), torch.randn(3, 16)

    def run(parallel: ParallelState, defer: bool) -> Any:
        layer = RowParallelLinear(context(parallel), 16, 5, bias=True, defer=defer)
        fill(layer, {("weight", None): weight, ("bias", None): bias})
        y = layer(x.chunk(tp, dim=1)[parallel.tp_rank])
        assert isinstance(y, PartialSum) == (defer and tp > 1)
        return reduced(y)

    for defer in (False, True):
        outputs = run_ranks(tp, partial(run, defer=defer))
        assert all(torch.equal(outputs[0], other) for other in outputs)
        torch.testing.assert_close(outputs[0], F.linear(x, weight, bias))


def test_a_sum_to_be_made_is_taken_by_norms_alone_and_names_its_layer() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 8), torch.randn(3, 8)

    def run(parallel: ParallelState) -> Any:
        norm = RMSNorm(context(parallel), 8, 1e-6)
        norm.weight.data.fill_(1.5)
        given = PartialSum(x[parallel.tp_rank], parallel, "layers.3.mlp.down_proj")
        for wrong in (lambda: given + residual, lambda: torch.cat([given, residual]), lambda: given.float()):
            with pytest.raises(PluginError, match=r"layers\.3\.mlp\.down_proj was built with defer=True"):
                wrong()
        assert (given.shape, len(given)) == ((3, 8), 3)
        return norm.add(given, residual), norm.add(given, None), norm(given)

    for added, first, alone in run_ranks(2, run):
        norm = RMSNorm(context(ParallelState()), 8, 1e-6)
        norm.weight.data.fill_(1.5)
        whole = x.sum(0)
        for got, want in ((added, norm.add(whole, residual)), (first, norm.add(whole, None))):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(alone, norm(whole))


@pytest.mark.parametrize("tp", SIZES)
def test_gated_mlp_over_ranks_equals_the_formula(tp: int) -> None:
    torch.manual_seed(0)
    gate, up, down, x = torch.randn(16, 6), torch.randn(16, 6), torch.randn(6, 16), torch.randn(4, 6)

    def run(parallel: ParallelState) -> Any:
        mlp = GatedMLP(context(parallel), 6, 16)
        fill(mlp.gate_up_proj, {("weight", 0): gate, ("weight", 1): up})
        fill(mlp.down_proj, {("weight", None): down})
        return mlp(x)

    result = run_ranks(tp, run)[-1]
    torch.testing.assert_close(result, (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda ctx: ColumnParallelLinear(ctx, 4, 6), r"layer output features=6 .*=4; use one of \[1, 2, 3, 6\]"),
        (lambda ctx: RowParallelLinear(ctx, 10, 4), r"layer input features=10 .*=4; use one of \[1, 2, 5, 10\]"),
        (lambda ctx: QKVParallelLinear(ctx, 4, 6, 2, 8), r"num_attention_heads=6 .*=4; use one of \[1, 2, 3, 6\]"),
        (lambda ctx: QKVParallelLinear(ctx, 4, 12, 3, 8), r"num_key_value_heads=3 .*=4; use one of \[1, 3, 6, 12\]"),
        (lambda ctx: QKVParallelLinear(ctx, 4, 24, 6, 8), r"num_key_value_heads=6 .*=4; .*\[1, 2, 3, 6, 12, 24\]"),
        (lambda ctx: VocabEmbedding(ctx, 5, 4), r"vocab_size=5 leaves a rank without rows with .*=4"),
    ],
)
def test_a_size_that_cannot_be_split_names_those_that_can(build, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(contexts(4)[3])


@pytest.mark.parametrize("tp", SIZES)
def test_an_uneven_vocabulary_adds_up(tp: int) -> None:
    torch.manual_seed(0)
    vocab, hidden = 61, 6
    weight, ids, h = torch.randn(vocab, hidden), torch.tensor([0, 60, 17, 59, 8]), torch.randn(3, hidden)
    # Two shards hold the best score of a token: the lower id wins, as in one piece.
    weight[60] = weight[1]

    def run(parallel: ParallelState) -> Any:
        ctx = context(parallel)
        embedding = VocabEmbedding(ctx, vocab, hidden)
        fill(embedding, {("weight", None): weight})
        rows = -(-vocab // tp)
        assert len(embedding.weight) == min(rows, vocab - parallel.tp_rank * rows)
        head = LMHead(ctx, vocab, hidden)
        fill(head, {("weight", None): weight})
        broken = h.clone()
        broken[1, 2] = torch.nan
        return embedding(ids), head.logits(h), head.argmax(h), head.argmax(broken)[0]

    h[0] = weight[1] * 9
    for embedded, scores, (values, tokens), broken in run_ranks(tp, run):
        torch.testing.assert_close(embedded, weight[ids])
        torch.testing.assert_close(scores, h @ weight.T)
        torch.testing.assert_close(values, scores.amax(dim=1))
        assert tokens.tolist() == scores.argmax(dim=1).tolist()
        assert tokens[0] == 1
        assert torch.isfinite(broken).tolist() == [True, False, True]


def test_head_options() -> None:
    torch.manual_seed(0)
    (ctx,) = contexts(1)
    embedding = VocabEmbedding(ctx, 11, 6)
    fill(embedding, {("weight", None): torch.randn(11, 6)})
    head, h = LMHead(ctx, 11, 6, tied_to=embedding, scale=0.5, soft_cap=3.0), torch.randn(4, 6)
    assert head.weight is embedding.weight
    plain = 0.5 * h @ embedding.weight.T
    torch.testing.assert_close(head.logits(h), 3 * torch.tanh(plain / 3))
    value, token = head.argmax(h)
    assert token.tolist() == plain.argmax(dim=1).tolist()
    torch.testing.assert_close(value, head.logits(h).amax(dim=1))


@pytest.mark.parametrize("score", [torch.inf, torch.nan])
def test_a_soft_cap_does_not_make_a_number_of_what_is_none(score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers may say infinity where a row has NaN."""
    head = LMHead(contexts(1)[0], 11, 6, soft_cap=3.0)
    head.weight.data.normal_()
    found = torch.tensor([score, 1.0])
    monkeypatch.setattr(head.quant.best, "fn", lambda hidden, weight: (found, torch.tensor([4, 5])))
    value, token = head.argmax(torch.zeros(2, 6))
    assert value.isfinite().tolist() == [False, True]
    assert token.tolist() == [4, 5]
    torch.testing.assert_close(value[1], 3 * torch.tanh(found[1] / 3))


def test_logits_are_fp32_whatever_the_model_is() -> None:
    ctx = BuildContext(torch.bfloat16, OPS, 64)
    head = LMHead(ctx, 11, 6)
    head.weight.data.zero_()
    assert head.logits(torch.zeros(2, 6, dtype=torch.bfloat16)).dtype is torch.float32


class Narrowing(nn.Module):
    """A layer that does as much as the stack asks of each: it may leave tokens out."""

    drops_tokens = True

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        return batch.select_tokens(hidden + 1), None


@pytest.mark.parametrize("wanted", [None, [2], [2, 0], [2, 0, 0], [1, 1, 1, 2]])
def test_a_stack_gives_the_states_that_are_asked_for(wanted: list[int] | None) -> None:
    """Each once, also where as many are asked for as there are tokens: the graph of a mixed step pads what it asks."""
    token, indices = torch.arange(3), None if wanted is None else torch.tensor(wanted)
    batch = ForwardBatch(token, token, [], logits_indices=indices)
    hidden, _ = LayerStack({n: Narrowing() for n in (2, 3)}, 4)(token[:, None].float(), batch)
    expected = token if indices is None else indices
    assert torch.equal(batch.select_sampled(hidden), expected[:, None] + 2.0)


def test_the_residual_stream_starts_with_the_first_input() -> None:
    norm, x, residual = RMSNorm(contexts(1)[0], 6, 1e-6), torch.randn(2, 6), torch.randn(2, 6)
    norm.weight.data.fill_(2.0)
    normed, stream = norm.add(x, None)
    torch.testing.assert_close((normed, stream), (norm(x), x))
    normed, stream = norm.add(x, residual)
    torch.testing.assert_close((normed, stream), (norm(x + residual), x + residual))
