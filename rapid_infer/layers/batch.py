"""What a model's forward gets: the tokens of one step, passed down explicitly."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field

from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata


@dataclass(frozen=True)
class InputEmbeds:
    """Embeddings that are given for some tokens of a step instead of looked up.

    indices  `[M]` int64, the tokens they belong to; their `input_ids` must be in the vocabulary all the same
    values   `[M, hidden]` in the model's dtype
    """

    indices: Tensor
    values: Tensor


@dataclass(frozen=True)
class StageState:
    """What one pipeline stage hands to the next: hidden and residual `[T, hidden]`, whose sum is the residual stream.

    residual None: the stream starts with hidden.
    """

    hidden: Tensor
    residual: Tensor | None


@dataclass
class ForwardBatch:
    """T tokens of R rows, flattened row after row.

    input_ids           `[T]` int64
    positions           `[T]` int64, or `[axes, T]` for models with several position axes
    attention           per cache group, what attention needs besides q
    input_embeds        embeddings that replace the looked up ones of some tokens
    received            what the pipeline stage before handed on; None in the first one, which embeds the tokens
    token_mask          `[T]` integers, 0 for a padding token, whose result nobody reads; None: there is none
    logits_indices      `[N]` int64: the tokens whose hidden states are asked for; None: all
    last_layer_indices  logits_indices in the last layer, where that may leave the other tokens out; else None
    aux_layers          numbers of layers after which the residual stream is wanted too, by a drafter say
    aux_hidden_states   by those numbers, `[T, hidden]`; the forward fills it
    """

    input_ids: Tensor
    positions: Tensor
    attention: Sequence[AttentionMetadata]
    input_embeds: InputEmbeds | None = None
    received: StageState | None = None
    token_mask: Tensor | None = None
    logits_indices: Tensor | None = None
    last_layer_indices: Tensor | None = None
    aux_layers: Sequence[int] = ()
    aux_hidden_states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[-1]

    def select_tokens(self, x: Tensor) -> Tensor:
        """x `[T, ...]`, in the last layer only those of its tokens that are asked for.

        For what attention gives: past it tokens do not see each other.
        """
        return x if self.last_layer_indices is None else x.index_select(0, self.last_layer_indices)

    def match_tokens(self, values: Tensor, hidden: Sized) -> Tensor:
        """`values [T, ...]` of the tokens that `hidden` holds, from which attention may have left some out.

        For all that a layer has per token besides: the residual stream, which tokens are padding.
        """
        return values if len(values) == len(hidden) else self.select_tokens(values)

    def select_sampled(self, hidden: Tensor) -> Tensor:
        """The states `[N, hidden]` asked for, of what a model returns: states of all tokens or of these."""
        if self.logits_indices is None or len(hidden) != self.num_tokens:
            return hidden
        return hidden.index_select(0, self.logits_indices)
