"""Runs one step: apply the delta, then forward and finish, replayed or eagerly. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.step_plan import LogprobArrays, StepPlan, StepResult
from rapid_infer.ops.registry import OpResolver
from rapid_infer.ops.step_inputs import Letter
from rapid_infer.profiling import span
from rapid_infer.worker.eager_step import EagerStep
from rapid_infer.worker.graph_runner import GraphRunner
from rapid_infer.worker.logprobs import Logprobs
from rapid_infer.worker.mailbox import Mailbox
from rapid_infer.worker.request_table import RequestTable
from rapid_infer.worker.sampler import SamplingOps
from rapid_infer.worker.staging import Staging

UPDATES_PER_ROW = 2
"""Block updates that a captured step takes along, per row and cache group."""


@dataclass(slots=True)
class StepHandle:
    """A launched step. `slot`: where in the mailbox a captured step writes; else `tokens` and `failed`, on the host."""

    count: int
    slot: int | None = None
    tokens: Tensor | None = None
    failed: Tensor | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    done: torch.cuda.Event | None = None


class ModelRunner:
    """Owns the device state of one rank. `model` follows the CausalLM contract, its caches bound already.

    Without `capture()` every step runs eagerly.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        ops: OpResolver,
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
        self.ops = ops
        self.block_size, self.max_model_len = block_size, max_model_len
        self.table = RequestTable(device, max_num_seqs, num_groups, -(-max_model_len // block_size), vocab_size)
        self.graphs: GraphRunner | None = None
        self._slots = queue_depth + 1
        self._staging = Staging(device, self._slots)
        self._eager = EagerStep(model, self.table, block_size, SamplingOps.bind(ops))
        self._events = [torch.cuda.Event() for _ in range(self._slots)] if device.type == "cuda" else []
        self._launched = 0

    def capture(self, max_tokens: int) -> None:
        """Record the decode graphs; mixed steps of up to `max_tokens` are recorded as they come.

        The caches must be bound and stay where they are.
        """
        rows, groups = self.table.dummy, len(self.table.block_tables)
        updates = UPDATES_PER_ROW * rows + max_tokens // self.block_size
        layout = Letter(rows, updates * groups, max_tokens)
        mailbox = Mailbox(self.device, layout, slots=self._slots, table_shape=self.table.block_tables.shape)
        graphs = GraphRunner(
            self.model, self.table, mailbox, self.ops, block_size=self.block_size, max_model_len=self.max_model_len
        )
        graphs.capture()
        self.graphs = graphs

    def close(self) -> None:
        self.model = self._eager.model = self.graphs = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        if self.graphs is not None and self.graphs.takes(plan):
            return self._launch_captured(self.graphs, plan)
        with span("worker.inputs"):
            staged = iter(self._staging.put([*self._eager.arrays(plan), *RequestTable.delta(plan)]))
            inputs = self._eager.inputs(plan, staged)
        with span("worker.eager"):
            results = self._eager.run(inputs, plan)
        handle = StepHandle(
            len(plan.sampled),
            tokens=self._to_host(results.tokens),
            failed=self._to_host(results.failed),
            logprobs=self._all_to_host(results.logprobs),
            prompt_logprobs=self._all_to_host(results.prompt_logprobs),
        )
        handle.done = self._record()
        return handle

    def _launch_captured(self, graphs: GraphRunner, plan: StepPlan) -> StepHandle:
        updates = sum(len(group.rows) for group in plan.new_blocks)
        extra = plan.new_rows is not None or plan.token_lists is not None or plan.masks is not None
        mail_blocks = not extra and updates <= graphs.mailbox.layout.max_updates
        if not mail_blocks:
            # New rows, their lists and masks: what a letter has no place for.
            self.table.apply(plan, iter(self._staging.put(RequestTable.delta(plan))))
        try:
            with span("worker.replay"):
                slot, logprobs = graphs.launch(plan, mail_blocks=mail_blocks)
        except BaseException:
            graphs.mailbox.resync()
            raise
        handle = StepHandle(len(plan.sampled), slot=slot, logprobs=self._all_to_host(logprobs))
        handle.done = self._record()
        return handle

    def _record(self) -> torch.cuda.Event | None:
        if not self._events:
            return None
        self._launched += 1
        event = self._events[self._launched % self._slots]
        event.record()
        return event

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not self._events:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def _all_to_host(self, logprobs: Logprobs | None) -> Logprobs | None:
        return None if logprobs is None else Logprobs(*map(self._to_host, logprobs))

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for the step. The one place where the host waits for the device."""
        if handle.done is not None:
            handle.done.synchronize()
        if handle.slot is not None:
            assert self.graphs is not None
            tokens, failed = self.graphs.mailbox.read(handle.slot, handle.count)
        else:
            assert handle.tokens is not None
            assert handle.failed is not None
            tokens, failed = handle.tokens.numpy().astype(np.int32), handle.failed.numpy()
        count = handle.count
        return StepResult(tokens, failed, _to_arrays(handle.logprobs, count), _to_arrays(handle.prompt_logprobs))


def _to_arrays(logprobs: Logprobs | None, count: int | None = None) -> LogprobArrays | None:
    if logprobs is None:
        return None
    ids, values, rank = (tensor.numpy()[:count] for tensor in logprobs)
    return LogprobArrays(ids.astype(np.int32), values, rank.astype(np.int32))
