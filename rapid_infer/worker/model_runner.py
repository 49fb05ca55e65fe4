"""Runs one step: apply the delta, then forward and finish, replayed or eagerly. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.step_plan import LogprobArrays, RowMasks, StepPlan, StepResult
from rapid_infer.ops.registry import OpResolver
from rapid_infer.ops.step_inputs import Letter
from rapid_infer.profiling import span
from rapid_infer.worker.eager_step import EagerStep, Hidden, StepInputs
from rapid_infer.worker.graph_recorder import GraphRecorder, Recorder
from rapid_infer.worker.graph_runner import GraphRunner
from rapid_infer.worker.logprobs import Logprobs
from rapid_infer.worker.mailbox import Mailbox
from rapid_infer.worker.request_table import RequestTable
from rapid_infer.worker.sampler import SamplingOps
from rapid_infer.worker.staging import Staging
from rapid_infer.worker.token_state import TokenState

UPDATES_PER_ROW = 2
"""Block updates that a captured step takes along, per row and cache group."""


@dataclass(slots=True)
class StepHandle:
    """A launched step. `slot`: where in the mailbox a captured step writes; else `tokens` and `failed`, on the host.

    `begun`: what an eager step still has to finish.
    """

    plan: StepPlan
    count: int
    begun: tuple[StepInputs, Hidden] | None = None
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
        self._unfinished = False

    def capture(self, max_tokens: int, recorder: Recorder | None = None) -> None:
        """Record steps of up to `max_tokens` tokens.

        The caches must be bound and stay where they are. `recorder`: a new one of this device unless given.
        """
        mailbox = make_mailbox(self.table, max_tokens, self.block_size, self._slots)
        graphs = GraphRunner(
            self.model,
            self.table,
            mailbox,
            self.ops,
            recorder or GraphRecorder(self.device, self.ops),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
        )
        graphs.capture()
        self.graphs = graphs

    def close(self) -> None:
        self.model = self._eager.model = self.graphs = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        if self.graphs is None or not self.graphs.takes(plan):
            handle = self.launch_forward(plan)
            self.launch_finish(handle)
            return handle
        mail_blocks = self._prepare(self.graphs, plan)
        with span("worker.replay"):
            slot, logprobs = self.graphs.launch(plan, mail_blocks=mail_blocks)
        self._unfinished = False
        handle = StepHandle(plan, len(plan.sampled), slot=slot, logprobs=self._all_to_host(logprobs))
        handle.done = self._record()
        return handle

    @torch.inference_mode()
    def launch_forward(self, plan: StepPlan) -> StepHandle:
        """Start a step whose tokens `launch_finish` chooses."""
        handle = StepHandle(plan, len(plan.sampled))
        if self.graphs is not None and self.graphs.takes(plan):
            mail_blocks = self._prepare(self.graphs, plan)
            with span("worker.forward"):
                handle.slot = self.graphs.launch_forward(plan, mail_blocks=mail_blocks)
            return handle
        with span("worker.inputs"):
            staged = iter(self._staging.put([*self._eager.arrays(plan), *RequestTable.delta(plan)]))
            inputs = self._eager.inputs(plan, staged)
        with span("worker.forward"):
            handle.begun = inputs, self._eager.forward(inputs)
        return handle

    @torch.inference_mode()
    def launch_finish(self, handle: StepHandle, masks: RowMasks | None = None) -> None:
        """Choose the tokens of the step just begun; `masks` hold from this step on."""
        plan = handle.plan
        if masks is not None:
            self.table.tokens.apply(None, masks, iter(self._staging.put(TokenState.delta(None, masks))))
        with span("worker.finish"):
            if handle.begun is None:
                assert self.graphs is not None
                handle.logprobs = self._all_to_host(self.graphs.launch_finish(plan))
                self._unfinished = False
            else:
                results = self._eager.finish(*handle.begun, plan)
                handle.begun = None
                handle.tokens, handle.failed = self._to_host(results.tokens), self._to_host(results.failed)
                handle.logprobs = self._all_to_host(results.logprobs)
                handle.prompt_logprobs = self._all_to_host(results.prompt_logprobs)
        handle.done = self._record()

    def _prepare(self, graphs: GraphRunner, plan: StepPlan) -> bool:
        """Before a captured step; returns whether its letter is to hold its block updates."""
        if self._unfinished:
            # The step before this one stopped half-way.
            graphs.mailbox.resync()
        self._unfinished = True
        updates = sum(len(group.rows) for group in plan.new_blocks)
        extra = plan.new_rows is not None or plan.token_lists is not None or plan.masks is not None
        if not extra and updates <= graphs.mailbox.layout.max_updates:
            return True
        # New rows, their lists and masks: what a letter has no place for.
        self.table.apply(plan, iter(self._staging.put(RequestTable.delta(plan))))
        return False

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


def make_mailbox(table: RequestTable, max_tokens: int, block_size: int, slots: int) -> Mailbox:
    """For recorded steps of up to `max_tokens` tokens over the rows of `table`."""
    rows, groups = table.dummy, len(table.block_tables)
    updates = UPDATES_PER_ROW * rows + max_tokens // block_size
    layout = Letter(rows, updates * groups, max_tokens)
    return Mailbox(table.length.device, layout, slots=slots, table_shape=table.block_tables.shape)


def _to_arrays(logprobs: Logprobs | None, count: int | None = None) -> LogprobArrays | None:
    if logprobs is None:
        return None
    ids, values, rank = (tensor.numpy()[:count] for tensor in logprobs)
    return LogprobArrays(ids.astype(np.int32), values, rank.astype(np.int32))
