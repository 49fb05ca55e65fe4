"""What a model's forward gets: the tokens of one step, passed down explicitly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata


@dataclass
class ForwardBatch:
    """T tokens of R rows, flattened row after row.

    input_ids      `[T]` int64
    positions      `[T]` int64, or `[axes, T]` for models with several position axes
    attention      per cache group, what attention needs besides q
    inputs_embeds  `[T, hidden]`, instead of looking up `input_ids`
    live           `[T]` integers, 0 for a padding token, whose result nobody reads; None: there is none
    logits_indices  `[N]` int64: the tokens whose hidden states are asked for; None: all
    kept           logits_indices in the last layer, where that may leave the other tokens out; else None
    """

    input_ids: Tensor
    positions: Tensor
    attention: Sequence[AttentionMetadata]
    inputs_embeds: Tensor | None = None
    live: Tensor | None = None
    logits_indices: Tensor | None = None
    kept: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[-1]

    def narrow(self, x: Tensor) -> Tensor:
        """x `[T, ...]`, in the last layer only those of its rows that are asked for.

        For what attention gives and for the residual stream: past attention tokens do not see each other.
        """
        return x if self.kept is None else x.index_select(0, self.kept)

    def sampled(self, hidden: Tensor) -> Tensor:
        """The states `[N, hidden]` asked for, of what a model returns: states of all tokens or of these."""
        if self.logits_indices is None or len(hidden) != self.num_tokens:
            return hidden
        return hidden.index_select(0, self.logits_indices)
