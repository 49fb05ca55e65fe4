"""Runs one step: apply the delta, gather the inputs, forward, finish. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.step_plan import StepPlan, StepResult
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.worker.request_table import RequestTable
from rapid_infer.worker.sampler import sample
from rapid_infer.worker.staging import Staging


@dataclass(slots=True)
class StepHandle:
    """A launched step. Holds its result tensors until they have been copied."""

    tokens: Tensor
    failed: Tensor
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
    ) -> None:
        self.model = model
        self.device = device
        self.block_size = block_size
        self.table = RequestTable(device, max_num_seqs, num_groups, -(-max_model_len // block_size))
        self._staging = Staging(device, slots=queue_depth + 1)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        inputs = self.prepare(plan)
        hidden = self.forward(inputs)
        tokens, failed = self.finish(inputs, hidden, plan)
        return self._copy_out(tokens, failed)

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
        staged = iter(self._staging.put([*arrays, *RequestTable.delta(plan)]))
        rows, query_lens, start, sampled = (next(staged) for _ in range(4))
        row_of_token, offset_of_token = (next(staged), next(staged)) if ragged else (None, None)
        from_host = next(staged) if len(plan.tokens) else None
        self.table.apply(plan, staged)
        return self._gather(plan, rows.long(), query_lens, start, sampled, row_of_token, offset_of_token, from_host)

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
            )
            for block_table in self.table.block_tables
        ]

    def forward(self, inputs: StepInputs) -> Tensor:
        """The first part of a step: hidden states `[S, hidden]` of the rows that get a token."""
        hidden = self.model(inputs.batch)
        return hidden if inputs.last is None else hidden[inputs.last]

    def finish(self, inputs: StepInputs, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """The second part: head, sampling, token write, state advance. Returns (tokens, failed), both `[S]`."""
        table, rows = self.table, inputs.sampled_rows
        table.length[inputs.rows] = inputs.seq_lens
        if not len(plan.sampled):
            return inputs.seq_lens[:0], inputs.seq_lens[:0].bool()
        logits = self.model.head.logits(hidden)
        tokens, failed = sample(logits, table.sampling.take(rows), inputs.sampled_lens, plan.features)
        table.last_token[rows] = tokens
        return tokens, failed

    def _copy_out(self, tokens: Tensor, failed: Tensor) -> StepHandle:
        if self.device.type != "cuda":
            return StepHandle(tokens, failed, None)
        host = [torch.empty_like(x, device="cpu", pin_memory=True) for x in (tokens, failed)]
        for target, source in zip(host, (tokens, failed)):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return StepHandle(host[0], host[1], done)

    @staticmethod
    def collect(handle: StepHandle) -> StepResult:
        """Wait for the step. The one place where the host waits for the device."""
        if handle.done is not None:
            handle.done.synchronize()
        return StepResult(handle.tokens.numpy().astype(np.int32), handle.failed.numpy())
