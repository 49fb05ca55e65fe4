"""Runs one step: apply the delta, gather the inputs, forward, finish. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.step_plan import LogprobArrays, StepPlan, StepResult
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.worker.logprobs import Logprobs, concatenate, gather_logprobs
from rapid_infer.worker.request_table import RequestTable
from rapid_infer.worker.sampler import sample
from rapid_infer.worker.staging import Staging

SCORED_AT_ONCE = 128


@dataclass(slots=True)
class StepHandle:
    """A launched step. Holds its result tensors, on the host, until they have been copied."""

    tokens: Tensor
    failed: Tensor
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    done: torch.cuda.Event | None


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
    """What the forward part leaves for the finish part: states of rows that get a token, and of tokens to be scored."""

    sampled: Tensor
    scored: Tensor | None


@dataclass(slots=True)
class Results:
    """What a step gives the host, on the device still."""

    tokens: Tensor
    failed: Tensor
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class ModelRunner:
    """Owns the device state of one rank. `model` follows the CausalLM contract, its caches bound already."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        queue_depth: int,
        vocab_size: int,
    ) -> None:
        self.model = model
        self.device = device
        self.block_size = block_size
        self.table = RequestTable(device, max_num_seqs, num_groups, -(-max_model_len // block_size), vocab_size)
        self._staging = Staging(device, slots=queue_depth + 1)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        inputs = self.prepare(plan)
        hidden = self.forward(inputs)
        return self._copy_out(self.finish(inputs, hidden, plan))

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Apply the plan's delta and gather the step's inputs from the table."""
        ragged = plan.max_query_len > 1
        query_start = np.zeros(len(plan.rows) + 1, np.int32)
        np.cumsum(plan.query_lens, out=query_start[1:])
        arrays: list[np.ndarray] = [plan.rows, plan.query_lens, query_start, plan.sampled]
        if ragged:
            row_of = np.repeat(np.arange(len(plan.rows), dtype=np.int32), plan.query_lens)
            offset = np.arange(plan.num_tokens, dtype=np.int32) - query_start[row_of]
            arrays += [row_of, offset]
        if len(plan.tokens):
            arrays.append(plan.tokens)
        if plan.prompt_scores is not None:
            arrays += [plan.prompt_scores.tokens, plan.prompt_scores.targets]
        staged = iter(self._staging.put([*arrays, *RequestTable.delta(plan)]))
        rows, query_lens, start, sampled = (next(staged) for _ in range(4))
        row_of_token, offset_of_token = (next(staged), next(staged)) if ragged else (None, None)
        from_host = next(staged) if len(plan.tokens) else None
        scores = (next(staged), next(staged)) if plan.prompt_scores is not None else None
        self.table.apply(plan, staged)
        inputs = self._gather(plan, rows.long(), query_lens, start, sampled, row_of_token, offset_of_token, from_host)
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
        row_of_token: Tensor | None,
        offset: Tensor | None,
        from_host: Tensor | None,
    ) -> StepInputs:
        table = self.table
        computed = table.length[rows]
        seq_lens = computed + query_lens
        if row_of_token is None or offset is None:
            token_rows, positions = rows, computed
        else:
            token_rows, positions = rows[row_of_token], computed[row_of_token] + offset
        input_ids = table.last_token[token_rows]
        if from_host is not None:
            input_ids = input_ids.where(from_host < 0, from_host.long())
        batch = ForwardBatch(input_ids, positions, self._attention(plan, rows, start, seq_lens, token_rows, positions))
        if len(plan.sampled) == len(plan.rows):
            last = None if plan.num_tokens == len(plan.rows) else start[1:] - 1
            return StepInputs(batch, rows, seq_lens, rows, seq_lens, last)
        picked = sampled.long()
        return StepInputs(batch, rows, seq_lens, rows[picked], seq_lens[picked], start[picked + 1] - 1)

    def _attention(
        self, plan: StepPlan, rows: Tensor, start: Tensor, seq_lens: Tensor, token_rows: Tensor, positions: Tensor
    ) -> Sequence[AttentionMetadata]:
        column = positions // self.block_size
        offset = positions % self.block_size
        lengths = seq_lens.int()
        return [
            AttentionMetadata(
                block_table=block_table,
                rows=rows,
                query_start=start,
                seq_lens=lengths,
                slots=block_table[token_rows, column].long() * self.block_size + offset,
                max_query_len=plan.max_query_len,
                max_seq_len=plan.max_seq_len,
                num_decodes=plan.num_decodes,
            )
            for block_table in self.table.block_tables
        ]

    def forward(self, inputs: StepInputs) -> Hidden:
        """The first part of a step: hidden states `[S, hidden]` of the rows that get a token."""
        hidden = self.model(inputs.batch)
        scored = None if inputs.scored is None else hidden[inputs.scored]
        return Hidden(hidden if inputs.last is None else hidden[inputs.last], scored)

    def finish(self, inputs: StepInputs, hidden: Hidden, plan: StepPlan) -> Results:
        """The second part: head, sampling, token write, state advance."""
        table, rows, features = self.table, inputs.sampled_rows, plan.features
        table.length[inputs.rows] = inputs.seq_lens
        prompt = self._score_prompt(inputs, hidden, plan)
        if not len(plan.sampled):
            none = inputs.seq_lens[:0]
            return Results(none, none.bool(), None, prompt)
        raw = logits = self.model.head.logits(hidden.sampled)
        state = table.sampling.take(rows) if features.random or features.processed else table.sampling
        broken = None
        if features.processed:
            broken = ~torch.isfinite(raw.amax(dim=-1))
            logits = table.tokens.process(raw, rows, inputs.sampled_lens, state, features)
        tokens, failed = sample(logits, state, inputs.sampled_lens, features)
        if broken is not None:
            failed |= broken
            tokens = tokens.where(~failed, 0)
        table.last_token[rows] = tokens
        if features.penalties:
            table.tokens.count(rows, tokens)
        logprobs = None if features.logprobs is None else gather_logprobs(raw, tokens, features.logprobs)
        return Results(tokens, failed, logprobs, prompt)

    def _score_prompt(self, inputs: StepInputs, hidden: Hidden, plan: StepPlan) -> Logprobs | None:
        if hidden.scored is None or inputs.targets is None or plan.prompt_scores is None:
            return None
        # In pieces: logits of a whole chunk would be the largest tensor of the step by far.
        pieces = zip(hidden.scored.split(SCORED_AT_ONCE), inputs.targets.split(SCORED_AT_ONCE))
        count = plan.prompt_scores.count
        return concatenate(
            [gather_logprobs(self.model.head.logits(states), target, count) for states, target in pieces]
        )

    def _copy_out(self, results: Results) -> StepHandle:
        on_gpu = self.device.type == "cuda"

        def to_host(tensor: Tensor) -> Tensor:
            if not on_gpu:
                return tensor
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

        def all_to_host(logprobs: Logprobs | None) -> Logprobs | None:
            return None if logprobs is None else Logprobs(*map(to_host, logprobs))

        copied = (
            to_host(results.tokens),
            to_host(results.failed),
            all_to_host(results.logprobs),
            all_to_host(results.prompt_logprobs),
        )
        done = None
        if on_gpu:
            done = torch.cuda.Event()
            done.record()
        return StepHandle(*copied, done)

    @staticmethod
    def collect(handle: StepHandle) -> StepResult:
        """Wait for the step. The one place where the host waits for the device."""
        if handle.done is not None:
            handle.done.synchronize()
        return StepResult(
            handle.tokens.numpy().astype(np.int32),
            handle.failed.numpy(),
            _to_arrays(handle.logprobs),
            _to_arrays(handle.prompt_logprobs),
        )


def _to_arrays(logprobs: Logprobs | None) -> LogprobArrays | None:
    if logprobs is None:
        return None
    return LogprobArrays(
        logprobs.ids.numpy().astype(np.int32), logprobs.values.numpy(), logprobs.rank.numpy().astype(np.int32)
    )
