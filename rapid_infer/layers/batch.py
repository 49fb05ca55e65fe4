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
    """

    input_ids: Tensor
    positions: Tensor
    attention: Sequence[AttentionMetadata]
    inputs_embeds: Tensor | None = None
    live: Tensor | None = None
