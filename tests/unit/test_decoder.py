"""The shell of a decoder: given embeddings, pipeline stages, states for drafters, and tokens that are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.layers.batch import ForwardBatch, InputEmbeds, StageState
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.decoder import DecoderConfig, DecoderLayer, DecoderModel
from rapid_infer.layers.mlp import GatedMLP
from rapid_infer.layers.parameter import Elsewhere
from rapid_infer.layers.stack import distinct_layers
from rapid_infer.loader.dummy import load_dummy
from rapid_infer.ops import OpResolver
from rapid_infer.parallel import ParallelState

CONFIG = DecoderConfig(11, 8, 4, 64, 1e-6, False)
ASKED = torch.tensor([4, 2])


class Mean(nn.Module):
    """As far as a shell can see, attention: a token gets the mean of those up to it."""

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return batch.select_tokens(x.cumsum(0) / (1 + batch.positions[:, None]))


class Model(DecoderModel):
    def attention(self, config: Any, ctx: BuildContext, number: int) -> nn.Module:
        return Mean()

    def feed_forward(self, config: Any, ctx: BuildContext, number: int) -> nn.Module:
        return GatedMLP(ctx, config.hidden_size, 12)


def build(cls: type = Model, stage: int = 0, stages: int = 1, config: DecoderConfig = CONFIG) -> Any:
    """Equal names get equal weights, whichever stage has them."""
    parallel = ParallelState(pp_rank=stage, pp_size=stages)
    model = cls(config, BuildContext(torch.float32, OpResolver("cpu"), 64, parallel))
    load_dummy(model, scale=0.3)
    return model


def batch(**fields: Any) -> ForwardBatch:
    ids = torch.tensor([3, 1, 4, 1, 5])
    return ForwardBatch(ids, torch.arange(5), [], **fields)


def test_given_embeddings_replace_looked_up_ones() -> None:
    model = build()
    looked_up = model.embed_tokens.weight[[3, 1, 4, 1, 5]]
    given = InputEmbeds(torch.tensor([3, 0]), looked_up[[2, 4]] * 2)
    embedded = model.embed(batch(input_embeds=given))
    rows = [2 * looked_up[4], *looked_up[1:3], 2 * looked_up[2], looked_up[4]]
    torch.testing.assert_close(embedded, torch.stack(rows))
    assert not torch.allclose(model(batch(input_embeds=given)), model(batch()))
    same = InputEmbeds(torch.arange(5), looked_up)
    torch.testing.assert_close(model(batch(input_embeds=same)), model(batch()))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_in_a_row_are_the_whole_model(stages: int, tie: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tie)
    whole, parts = build(config=config), [build(Model, n, stages, config) for n in range(stages)]
    names = [name for part in parts for name in part.layers._here]
    assert names == list(whole.layers._modules)
    received = None
    for part in parts[:-1]:
        received = part(batch(received=received, logits_indices=ASKED))
        assert isinstance(received, StageState)
        assert received.residual is not None
        assert len(received.hidden) == len(received.residual) == 5  # the next stage's attention needs every token
        assert type(part.norm) is type(part.head) is Elsewhere
    last = parts[-1]
    hidden = last(batch(received=received, logits_indices=ASKED))
    torch.testing.assert_close(hidden, whole(batch())[ASKED])
    assert isinstance(last.embed_tokens, Elsewhere) != tie
    torch.testing.assert_close(last.head.logits(hidden), whole.head.logits(hidden))


def test_stages_are_as_even_as_they_can_be() -> None:
    stages = [ParallelState(pp_rank=rank, pp_size=3).stage_layers(8) for rank in range(3)]
    assert stages == [range(3), range(3, 6), range(6, 8)]
    with pytest.raises(ConfigError, match="=2 leaves a stage of pipeline_parallel_size=3 empty; use 2 or fewer"):
        ParallelState(pp_size=3).stage_layers(2)


@pytest.mark.parametrize("few", [False, True])
def test_states_after_chosen_layers_are_those_of_all_tokens(few: bool) -> None:
    """Also of the last layer, which then leaves none out; and when layers of a kind are skipped."""
    model = build()
    states = []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, args, result: states.append(result[0] + result[1]))
    hidden = model(batch())
    given = batch(logits_indices=ASKED, aux_layers=(1, 3))
    if few:
        with distinct_layers(model):
            model(given)
        assert sorted(given.aux_hidden_states) == [1, 3]
        return
    result = model(given)
    torch.testing.assert_close(given.aux_hidden_states, {1: states[1], 3: states[3]})
    torch.testing.assert_close(result, hidden)
    torch.testing.assert_close(given.select_sampled(result), hidden[ASKED])
    early = batch(logits_indices=ASKED, aux_layers=(1,))
    torch.testing.assert_close(model(early), hidden[ASKED])
    torch.testing.assert_close(early.aux_hidden_states, {1: states[1]})


class Parallel(DecoderLayer):
    """Attention and feed-forward beside each other, by an author who has not heard of tokens that are left out."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn(x, batch) + self.mlp(x, batch), residual


class ParallelModel(Model):
    def layer(self, config: Any, ctx: BuildContext, number: int) -> nn.Module:
        return Parallel(ctx, config, Mean(), GatedMLP(ctx.sub("mlp"), config.hidden_size, 12))


def test_a_layer_with_a_forward_of_its_own_keeps_all_tokens() -> None:
    model = build(ParallelModel)
    result = model(batch(logits_indices=ASKED))
    torch.testing.assert_close(result, model(batch()))
    assert len(build()(batch(logits_indices=ASKED))) == len(ASKED)


def test_a_model_that_builds_no_attention_is_told() -> None:
    class Unfinished(DecoderModel): ...

    with pytest.raises(PluginError, match=r"Unfinished has no attention\(self, config, ctx, number\)"):
        build(Unfinished)
