"""A step of any shape, launched operator by operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.step_plan import StepPlan
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.worker.finish import choose
from rapid_infer.worker.logprobs import Logprobs, concatenate, gather_logprobs
from rapid_infer.worker.request_table import RequestTable
from rapid_infer.worker.sampler import SamplingOps

SCORED_AT_ONCE = 128


@dataclass(slots=True)
class StepInputs:
    """A step on the device. `rows` `[R]`, `sampled_rows` `[S]` and `last` `[S]` (None: all tokens) are int64."""

    batch: ForwardBatch
    rows: Tensor
    seq_lens: Tensor
    sampled_rows: Tensor
    sampled_lens: Tensor
    last: Tensor | None
    scored: Tensor | None = None
    targets: Tensor | None = None


@dataclass(slots=True)
class Hidden:
    """What a forward leaves: states of the rows that get a token, and of tokens to be scored."""

    sampled: Tensor
    scored: Tensor | None


@dataclass(slots=True)
class Results:
    """What a step gives the host, on the device still."""

    tokens: Tensor
    failed: Tensor
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class EagerStep:
    def __init__(self, model: Any, table: RequestTable, block_size: int, sampling: SamplingOps) -> None:
        self.model, self.table, self.block_size, self.sampling = model, table, block_size, sampling

    @staticmethod
    def arrays(plan: StepPlan) -> list[np.ndarray]:
        """What `inputs` needs on the device, in its order; the table's delta follows."""
        query_start = np.zeros(len(plan.rows) + 1, np.int32)
        np.cumsum(plan.query_lens, out=query_start[1:])
        arrays: list[np.ndarray] = [plan.rows, plan.query_lens, query_start, plan.sampled]
        if plan.max_query_len > 1:
            row_of = np.repeat(np.arange(len(plan.rows), dtype=np.int32), plan.query_lens)
            arrays += [row_of, np.arange(plan.num_tokens, dtype=np.int32) - query_start[row_of]]
        if len(plan.tokens):
            arrays.append(plan.tokens)
        if plan.prompt_scores is not None:
            arrays += [plan.prompt_scores.tokens, plan.prompt_scores.targets]
        return arrays

    def inputs(self, plan: StepPlan, staged: Iterator[Tensor]) -> StepInputs:
        """Apply the plan's delta and gather the step's inputs from the table."""
        rows, query_lens, start, sampled = (next(staged) for _ in range(4))
        token_of = (next(staged), next(staged)) if plan.max_query_len > 1 else None
        from_host = next(staged) if len(plan.tokens) else None
        scores = (next(staged), next(staged)) if plan.prompt_scores is not None else None
        self.table.apply(plan, staged)
        inputs = self._gather(plan, rows.long(), query_lens, start, sampled, token_of, from_host)
        if scores is not None:
            inputs.scored, inputs.targets = scores[0].long(), scores[1].long()
        return inputs

    def _gather(
        self,
        plan: StepPlan,
        rows: Tensor,
        query_lens: Tensor,
        start: Tensor,
        sampled: Tensor,
        token_of: tuple[Tensor, Tensor] | None,
        from_host: Tensor | None,
    ) -> StepInputs:
        """`token_of`: per token its index in `rows` and its place in its row's chunk; None: one token per row."""
        table = self.table
        computed = table.length[rows]
        seq_lens = computed + query_lens
        if token_of is None:
            token_rows, positions = rows, computed
        else:
            token_rows, positions = rows[token_of[0]], computed[token_of[0]] + token_of[1]
        input_ids = table.last_token[token_rows]
        if from_host is not None:
            input_ids = input_ids.where(from_host < 0, from_host.long())
        batch = ForwardBatch(input_ids, positions, self._attention(plan, rows, start, seq_lens, token_rows, positions))
        if len(plan.sampled) == len(plan.rows):
            last = None if plan.num_tokens == len(plan.rows) else start[1:] - 1
            inputs = StepInputs(batch, rows, seq_lens, rows, seq_lens, last)
        else:
            picked = sampled.long()
            inputs = StepInputs(batch, rows, seq_lens, rows[picked], seq_lens[picked], start[picked + 1] - 1)
        if len(plan.sampled) and plan.prompt_scores is None:
            batch.logits_indices = inputs.last
        return inputs

    def _attention(
        self, plan: StepPlan, rows: Tensor, start: Tensor, seq_lens: Tensor, token_rows: Tensor, positions: Tensor
    ) -> Sequence[AttentionMetadata]:
        column = positions // self.block_size
        offset = positions % self.block_size
        lengths = seq_lens.int()
        num_decodes = plan.num_decodes
        return [
            AttentionMetadata(
                block_table=block_table,
                rows=rows,
                query_start=start,
                seq_lens=lengths,
                slots=block_table[token_rows, column].long() * self.block_size + offset,
                max_query_len=plan.max_query_len,
                max_seq_len=plan.max_seq_len,
                num_decodes=num_decodes,
                max_context_len=plan.max_context_len,
            )
            for block_table in self.table.block_tables
        ]

    def forward(self, inputs: StepInputs) -> Hidden:
        """The first part of a step."""
        hidden = self.model(inputs.batch)
        if inputs.batch.logits_indices is not None:
            return Hidden(inputs.batch.sampled(hidden), None)
        scored = None if inputs.scored is None else hidden[inputs.scored]
        return Hidden(hidden if inputs.last is None else hidden[inputs.last], scored)

    def finish(self, inputs: StepInputs, hidden: Hidden, plan: StepPlan) -> Results:
        """The second part: head, sampling, token write and state advance."""
        table, rows, features = self.table, inputs.sampled_rows, plan.features
        table.length[inputs.rows] = inputs.seq_lens
        prompt = self._score_prompt(hidden.scored, inputs, plan)
        if not len(plan.sampled):
            none = inputs.seq_lens[:0]
            return Results(none, none.bool(), None, prompt)
        chosen = choose(self.model.head, table, hidden.sampled, rows, inputs.sampled_lens, features, self.sampling)
        failed = ~torch.isfinite(chosen.best)
        tokens = chosen.tokens.where(~failed, 0)
        table.last_token[rows] = tokens
        if features.penalties:
            table.tokens.count(rows, tokens)
        return Results(tokens, failed, chosen.logprobs, prompt)

    def _score_prompt(self, scored: Tensor | None, inputs: StepInputs, plan: StepPlan) -> Logprobs | None:
        if scored is None or inputs.targets is None or plan.prompt_scores is None:
            return None
        # In pieces: logits of a whole chunk would be the largest tensor of the step by far.
        pieces = zip(scored.split(SCORED_AT_ONCE), inputs.targets.split(SCORED_AT_ONCE))
        count = plan.prompt_scores.count
        return concatenate(
            [gather_logprobs(self.model.head.logits(states), target, count) for states, target in pieces]
        )
