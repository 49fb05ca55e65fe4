"""Runs one step: apply the delta, write its entry in the ring, then forward and sample, replayed or eagerly.

Nothing here waits for the device but `collect`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.step_plan import LogprobArrays, RowMasks, StepPlan, StepResult
from rapid_infer.ops.registry import OpResolver
from rapid_infer.ops.step_inputs import StepLayout
from rapid_infer.profiling import span
from rapid_infer.worker.device_rows import DeviceRows
from rapid_infer.worker.graph_recorder import GraphRecorder, Recorder
from rapid_infer.worker.graph_runner import DECODE, GraphRunner, Key
from rapid_infer.worker.logprobs import Logprobs
from rapid_infer.worker.program import ForwardOutput, StepProgram, StepShape
from rapid_infer.worker.staging import Staging
from rapid_infer.worker.step_ring import MAX_TABLE_ENTRIES, StepRing, check_entries
from rapid_infer.worker.token_state import TokenState

UPDATES_PER_ROW = 2
"""Block updates that a step's entry has room for, per row and cache group."""


@dataclass(slots=True)
class StepHandle:
    """A launched step, whose tokens will be in `slot` of the ring.

    key       the graphs that run it; None: it runs eagerly
    output    of an eager forward, from which tokens are still to be sampled
    targets   `[n]` int64: the prompt tokens whose log-probabilities are asked for
    """

    plan: StepPlan
    slot: int
    key: Key | None = None
    output: ForwardOutput | None = None
    targets: Tensor | None = None
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
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        queue_depth: int,
        vocab_size: int,
    ) -> None:
        self.device = device
        self.ops = ops
        self.max_model_len = max_model_len
        self.device_rows = DeviceRows(device, max_num_seqs, num_groups, -(-max_model_len // block_size), vocab_size)
        self._slots = queue_depth + 1
        self.ring = make_ring(self.device_rows, max_num_batched_tokens, block_size, self._slots)
        self.program = StepProgram(model, self.device_rows, self.ring, ops, block_size)
        self.graphs: GraphRunner | None = None
        self._staging = Staging(device, self._slots)
        self._events = [torch.cuda.Event() for _ in range(self._slots)] if device.type == "cuda" else []
        self._launched = 0
        self._half_launched = False

    @property
    def model(self) -> Any:
        return self.program.model

    def capture(self, max_tokens: int, recorder: Recorder | None = None) -> None:
        """Record steps of up to `max_tokens` tokens.

        The caches must be bound and stay where they are. `recorder`: a new one of this device unless given. ConfigError
        when the block tables are too large for it.
        """
        check_entries(self.device_rows.block_tables.shape)
        recorder = recorder or GraphRecorder(self.device, self.ops)
        graphs = GraphRunner(self.program, recorder, max_tokens=max_tokens, max_model_len=self.max_model_len)
        graphs.capture()
        self.graphs = graphs

    def close(self) -> None:
        self.program.model = self.graphs = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        handle = self._forward(plan)
        self._sample(handle, None)
        return handle

    @torch.inference_mode()
    def launch_forward(self, plan: StepPlan) -> StepHandle:
        """Start a step whose tokens `launch_sample` chooses."""
        return self._forward(plan)

    @torch.inference_mode()
    def launch_sample(self, handle: StepHandle, masks: RowMasks | None = None) -> None:
        """Choose the tokens of the step just begun; `masks` hold from this step on."""
        self._sample(handle, masks)

    def _forward(self, plan: StepPlan) -> StepHandle:
        graphs = self.graphs
        key = graphs.key_of(plan) if graphs is not None and graphs.can_run(plan) else None
        with span("worker.forward"):
            handle, prompt_tokens = self._write_inputs(plan, key)
            if key is not None:
                assert graphs is not None
                graphs.launch_forward(key)
            else:
                # On a GPU the same launches as in a graph.
                shape = StepShape.of(plan, counted=self.device.type == "cpu")
                handle.output = self.program.forward(shape, prompt_tokens)
        return handle

    def _sample(self, handle: StepHandle, masks: RowMasks | None) -> None:
        plan = handle.plan
        if masks is not None:
            staged = self._staging.copy_to_device(TokenState.pack_changes(None, masks))
            self.device_rows.tokens.apply_changes(None, masks, iter(staged))
        with span("worker.sample"):
            if handle.output is not None:
                logprobs = self._sample_eagerly(handle, handle.output)
            else:
                assert self.graphs is not None
                assert handle.key is not None
                logprobs = self.graphs.launch_sample(handle.key, plan.features)
            self._half_launched = False
            if logprobs is not None:
                handle.logprobs = self._to_host(logprobs)
        handle.done = self._record()

    def _sample_eagerly(self, handle: StepHandle, output: ForwardOutput) -> Logprobs | None:
        plan, targets, logprobs = handle.plan, handle.targets, None
        handle.output = handle.targets = None
        if len(plan.sampled):
            logprobs = self.program.sample(output, plan.features)
        else:
            # No row gets a token.
            self.ring.resync()
        if (wanted := plan.prompt_logprobs) is not None:
            assert output.prompt_hidden is not None
            assert targets is not None
            prompt_logprobs = self.program.prompt_logprobs(output.prompt_hidden, targets, wanted.count)
            handle.prompt_logprobs = self._to_host(prompt_logprobs)
        return logprobs

    def _write_inputs(self, plan: StepPlan, key: Key | None) -> tuple[StepHandle, Tensor | None]:
        """Write the step's entry, after what it has no place for: new rows, their lists and masks, which prompt
        log-probabilities are asked for.

        Also returns the tokens after which they are, `[n]` int64.
        """
        if self._half_launched:
            # The step before this one stopped half-way.
            self.ring.resync()
        self._half_launched = True
        updates = sum(len(group.rows) for group in plan.new_blocks)
        extra = plan.new_rows is not None or plan.token_lists is not None or plan.masks is not None
        staged = extra or updates > self.ring.layout.max_updates
        wanted, prompt_tokens, targets = plan.prompt_logprobs, None, None
        if staged or wanted is not None:
            with span("worker.staging"):
                arrays = DeviceRows.pack_plan(plan) if staged else []
                if wanted is not None:
                    # All in one copy: there is a buffer for each step in flight.
                    arrays += [wanted.tokens, wanted.targets]
                on_device = iter(self._staging.copy_to_device(arrays))
                if staged:
                    self.device_rows.apply_plan(plan, on_device)
                if wanted is not None:
                    prompt_tokens, targets = next(on_device).long(), next(on_device).long()
        blocks = () if staged else plan.new_blocks
        if plan.is_decode if key is None else key[0] == DECODE:
            slot = self.ring.write_decode(plan.rows, len(plan.rows) if key is None else key[1], blocks)
        else:
            slot = self.ring.write_mixed(plan, blocks)
        return StepHandle(plan, slot, key, targets=targets), prompt_tokens

    def _record(self) -> torch.cuda.Event | None:
        if not self._events:
            return None
        self._launched += 1
        event = self._events[self._launched % self._slots]
        event.record()
        return event

    def _to_host(self, logprobs: Logprobs) -> Logprobs:
        if not self._events:
            return logprobs
        pinned = (torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in logprobs)
        return Logprobs(*(host.copy_(tensor, non_blocking=True) for host, tensor in zip(pinned, logprobs)))

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for the step. The one place where the host waits for the device."""
        if handle.done is not None:
            handle.done.synchronize()
        count = len(handle.plan.sampled)
        tokens, failed = self.ring.read_results(handle.slot, count)
        logprobs, prompt_logprobs = _to_arrays(handle.logprobs, count), _to_arrays(handle.prompt_logprobs)
        return StepResult(tokens[:, None], failed, logprobs, prompt_logprobs)


def make_ring(device_rows: DeviceRows, max_tokens: int, block_size: int, slots: int) -> StepRing:
    """For steps of up to `max_tokens` tokens over these rows."""
    rows, groups = device_rows.padding_row, len(device_rows.block_tables)
    updates = (UPDATES_PER_ROW * rows + max_tokens // block_size) * groups
    if device_rows.block_tables.numel() > MAX_TABLE_ENTRIES:
        updates = 0
    layout = StepLayout(rows, updates, max_tokens)
    return StepRing(device_rows.length.device, layout, slots=slots, table_shape=device_rows.block_tables.shape)


def _to_arrays(logprobs: Logprobs | None, count: int | None = None) -> LogprobArrays | None:
    if logprobs is None:
        return None
    ids, values, rank = (tensor.numpy()[:count] for tensor in logprobs)
    return LogprobArrays(ids.astype(np.int32), values, rank.astype(np.int32))
