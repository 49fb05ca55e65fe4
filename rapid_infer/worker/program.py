"""One step on the device, inputs -> forward -> sample: run as it is when eager, recorded and replayed otherwise.

It begins with the entry of the ring that the host has written and ends where `commit_tokens` leaves the tokens for it;
nothing between them asks the host. What the host knows of a step beside its entry is a `StepShape`: that of its plan
for a step that is run, the largest there can be for one that is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.engine.step_plan import StepPlan
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.registry import OpResolver
from rapid_infer.worker.device_rows import DeviceRows
from rapid_infer.worker.logprobs import Logprobs, concatenate, gather_logprobs
from rapid_infer.worker.sample import SampledTokens, SamplingOps, sample_tokens
from rapid_infer.worker.step_ring import StepRing

PROMPT_LOGPROBS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's tensors and bounds of what is in them.

    decode    one token for each row, which the device has, and a new one for each; no query is longer
    sampled   rows that get a token; where none does, the padding row stands for them
    num_decodes   rows of one token, which come first; None: only the device knows how many
    max_context_len   see `AttentionMetadata`
    """

    decode: bool
    rows: int
    tokens: int
    sampled: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int | None
    max_context_len: int | None

    @classmethod
    def of(cls, plan: StepPlan, *, counted: bool) -> StepShape:
        """Of a plan, without padding. Not `counted`: as in a recorded step, only the device knows `num_decodes`."""
        return cls(
            plan.is_decode,
            len(plan.rows),
            plan.num_tokens,
            max(len(plan.sampled), 1),
            plan.max_query_len,
            plan.max_seq_len,
            plan.num_decodes if counted or plan.is_decode else None,
            plan.max_context_len,
        )


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward leaves of the rows that get a token.

    hidden         `[S, hidden]`
    rows           `[S]` int64
    lengths        `[S]` int32, this step's tokens included
    prompt_hidden  `[n, hidden]`: of the tokens after which prompt log-probabilities are asked for, if any
    """

    hidden: Tensor
    rows: Tensor
    lengths: Tensor
    prompt_hidden: Tensor | None = None

    def first_rows(self, n: int) -> ForwardOutput:
        return ForwardOutput(self.hidden[:n], self.rows[:n], self.lengths[:n])


class StepProgram:
    """Launches a step's operators. `model` follows the CausalLM contract, its caches bound already."""

    def __init__(self, model: Any, device_rows: DeviceRows, ring: StepRing, ops: OpResolver, block_size: int) -> None:
        self.model, self.device_rows, self.ring = model, device_rows, ring
        self._state = ring.inputs, ring.step, device_rows.block_tables, device_rows.last_token, device_rows.length
        self._sizes = ring.layout, block_size
        self._decode_inputs, self._mixed_inputs, self._commit = (
            ops.bind(name, torch.int32) for name in ("decode_inputs", "mixed_inputs", "commit_tokens")
        )
        self._sampling = SamplingOps.bind(ops)
        max_rows, device = ring.layout.max_rows, device_rows.length.device
        self._rows = torch.full((max_rows,), device_rows.padding_row, dtype=torch.int64, device=device)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def forward(self, shape: StepShape, prompt_tokens: Tensor | None = None) -> ForwardOutput:
        """The first part of a step. The result is good until the next forward.

        prompt_tokens  int64: which tokens' hidden states are asked for beside the sampled ones
        """
        batch, rows, lengths = self._decode(shape) if shape.decode else self._mixed(shape)
        wanted = batch.logits_indices
        if prompt_tokens is not None:
            batch.logits_indices = None
        hidden = self.model(batch)
        batch.logits_indices = wanted
        prompt_hidden = None if prompt_tokens is None else hidden[prompt_tokens]
        return ForwardOutput(batch.select_sampled(hidden), rows, lengths, prompt_hidden)

    def _decode(self, shape: StepShape) -> tuple[ForwardBatch, Tensor, Tensor]:
        """(batch, rows that get a token, their lengths)."""
        rows = self._rows[: shape.rows]
        ids, positions, lengths, slots = self._decode_inputs(*self._state, rows, *self._sizes)
        attention = self._attention(shape, rows, self._query_start[: shape.rows + 1], lengths, slots)
        return ForwardBatch(ids, positions, attention, token_mask=lengths), rows, lengths

    def _mixed(self, shape: StepShape) -> tuple[ForwardBatch, Tensor, Tensor]:
        """The same for any mix of rows; what the operator pads is cut off as far as the shape says."""
        made = self._mixed_inputs(*self._state, shape.tokens, *self._sizes)
        n, sampled = shape.rows, shape.sampled
        start, lengths = made.query_start[: n + 1], made.seq_lens[:n]
        attention = self._attention(shape, made.rows[:n], start, lengths, made.slots, made.decodes)
        batch = ForwardBatch(
            made.input_ids, made.positions, attention, token_mask=made.token_mask, logits_indices=made.last[:sampled]
        )
        return batch, made.sampled_rows[:sampled], made.sampled_lens[:sampled]

    def _attention(
        self,
        shape: StepShape,
        rows: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        slots: Tensor,
        decodes: Tensor | None = None,
    ) -> Sequence[AttentionMetadata]:
        known = shape.num_decodes
        return [
            AttentionMetadata(
                block_table=block_table,
                rows=rows,
                query_start=query_start,
                seq_lens=seq_lens,
                slots=slots[group],
                max_query_len=shape.max_query_len,
                max_seq_len=shape.max_seq_len,
                num_decodes=shape.rows if known is None else known,
                decodes=decodes if known is None else None,
                max_context_len=shape.max_context_len,
            )
            for group, block_table in enumerate(self.device_rows.block_tables)
        ]

    def sample_tokens(self, output: ForwardOutput, features: SamplingFeatures) -> SampledTokens:
        """A token for each row; changes nothing."""
        head, ops = self.model.head, self._sampling
        return sample_tokens(head, self.device_rows, output.hidden, output.rows, output.lengths, features, ops)

    def sample(self, output: ForwardOutput, features: SamplingFeatures) -> Logprobs | None:
        """The second part of a step: tokens to where the next step and the host find them, lengths and step advance."""
        device_rows, ring = self.device_rows, self.ring
        new = self.sample_tokens(output, features)
        if features.penalties:
            device_rows.tokens.count_tokens(output.rows, new.tokens)
        state = device_rows.last_token, device_rows.length, ring.results, ring.step
        self._commit(output.rows, new.tokens, new.finite_if_valid, *state)
        return new.logprobs

    def prompt_logprobs(self, states: Tensor, targets: Tensor, count: int) -> Logprobs:
        """Log-probabilities of `targets` `[n]` int64 after `states` `[n, hidden]`, and of the `count` best."""
        # In pieces: logits of a whole chunk would be the largest tensor of the step by far.
        pieces = zip(states.split(PROMPT_LOGPROBS_AT_ONCE), targets.split(PROMPT_LOGPROBS_AT_ONCE))
        return concatenate([gather_logprobs(self.model.head.logits(some), target, count) for some, target in pieces])
