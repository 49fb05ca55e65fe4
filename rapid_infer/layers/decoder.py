"""The shell of a decoder: embedding, a stack of pre-norm layers, last norm and head, or a pipeline stage of them.

A model brings attention and feed-forward. What concerns all of them has its one place here: the residual stream and
its reductions, which tokens the last layer goes on with, given embeddings, and what one stage hands to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rapid_infer.errors import PluginError
from rapid_infer.layers.batch import ForwardBatch, StageState
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.embedding import LMHead, VocabEmbedding
from rapid_infer.layers.module import LayerModule
from rapid_infer.layers.norm import RMSNorm
from rapid_infer.layers.parameter import Elsewhere
from rapid_infer.parallel.partial_sum import PartialSum, reduced


@dataclass(frozen=True)
class DecoderConfig:
    """What the shell needs of a model's config, and the engine: `max_position_embeddings` is the longest sequence."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool


class DecoderLayer(LayerModule):
    """Norm, attention, norm, feed-forward, each pair's result added to the residual stream.

    `self_attn(x, batch)` gives `[tokens, hidden]`, in the last layer of those tokens alone that `batch.select_tokens`
    leaves (as `Attention` does by itself) or of all; `mlp(x, batch)` keeps its tokens.
    """

    drops_tokens = True
    """Whether attention may leave tokens out of the last layer. A subclass with a forward of its own has to say so."""

    def __init__(self, ctx: BuildContext, config: DecoderConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(ctx.sub("input_layernorm"), size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(ctx.sub("post_attention_layernorm"), size, eps)
        self.mlp = mlp

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls) and "drops_tokens" not in vars(cls):
            cls.drops_tokens = False

    def forward(
        self, x: Tensor | PartialSum, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor | PartialSum, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, batch)
        x, residual = self.post_attention_layernorm.add(x, batch.match_tokens(residual, x))
        return self.mlp(x, batch), residual


class DecoderModel(nn.Module):
    """A model of `DecoderLayer`s, or the part of one that a pipeline stage has.

    The first stage has `embed_tokens`, the last one `norm` and `head`, and `embed_tokens` if it is tied to the head. A
    subclass builds `attention` and `feed_forward`, or `layer` as a whole.
    """

    embed_tokens: VocabEmbedding | Elsewhere
    norm: RMSNorm | Elsewhere
    head: LMHead | Elsewhere

    def __init__(self, config: Any, ctx: BuildContext) -> None:
        super().__init__()
        vocab, size, tie = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        first, last = ctx.parallel.is_first_stage, ctx.parallel.is_last_stage
        embedding = VocabEmbedding(ctx.sub("embed_tokens"), vocab, size) if first or (last and tie) else None
        self.embed_tokens = embedding or Elsewhere()
        self.layers = ctx.layers(config.num_hidden_layers, lambda ctx, number: self.layer(config, ctx, number))
        self.norm, self.head = Elsewhere(), Elsewhere()
        if last:
            self.norm = RMSNorm(ctx.sub("norm"), size, config.rms_norm_eps)
            self.head = LMHead(ctx.sub("head"), vocab, size, tied_to=embedding if tie else None)

    def layer(self, config: Any, ctx: BuildContext, number: int) -> nn.Module:
        """The decoder layer with this number in the whole model; see `LayerStack` for what it takes and gives."""
        attention = self.attention(config, ctx.sub("self_attn"), number)
        return DecoderLayer(ctx, config, attention, self.feed_forward(config, ctx.sub("mlp"), number))

    def attention(self, config: Any, ctx: BuildContext, number: int) -> nn.Module:
        """`self_attn` of this layer."""
        raise PluginError(f"{type(self).__name__} has no attention(self, config, ctx, number), which builds self_attn")

    def feed_forward(self, config: Any, ctx: BuildContext, number: int) -> nn.Module:
        """`mlp` of this layer."""
        raise PluginError(f"{type(self).__name__} has no feed_forward(self, config, ctx, number), which builds mlp")

    def embed(self, batch: ForwardBatch) -> Tensor:
        """`[tokens, hidden]` that the first layer gets."""
        x = self.embed_tokens(batch.input_ids)
        given = batch.input_embeds
        return x if given is None else x.index_copy_(0, given.indices, given.values)

    def forward(self, batch: ForwardBatch) -> Tensor | StageState:
        """The last stage: normed hidden states `[tokens, hidden]`, see `ForwardBatch.select_sampled`. Others: what they
        hand on, of all tokens.
        """
        received = batch.received or StageState(self.embed(batch), None)
        x, residual = self.layers(received.hidden, batch, received.residual)
        return StageState(reduced(x), residual) if isinstance(self.norm, Elsewhere) else self.norm.add(x, residual)[0]
