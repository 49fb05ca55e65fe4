"""Several ranks, each in a process of its own: the caller's process plans, and no rank's failure takes it along."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rapid_infer.cache.pools import shared_pools
from rapid_infer.config import EngineConfig
from rapid_infer.device import physical_cores
from rapid_infer.engine.executor import ModelInfo
from rapid_infer.engine.step_plan import RowMasks, StepPlan, StepResult
from rapid_infer.errors import ConfigError, RapidInferError
from rapid_infer.executors import rank_messages as messages
from rapid_infer.executors.external import Launch, gather
from rapid_infer.executors.rank_group import RankGroup
from rapid_infer.executors.rank_messages import Allocate, Build, Done, Profile, Profiled, Sample, Step
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.profiling import span
from rapid_infer.worker.build import build_model, cache_groups
from rapid_infer.worker.capacity import check_memory

SHARE_GPUS = "RAPID_INFER_SHARE_GPUS"
"""Set to 1, more ranks than GPUs share them: slower than one rank, and for tests alone."""


def start_ranks(config: EngineConfig) -> RankGroup:
    """As many as the configuration asks for. ConfigError when there are not as many devices."""
    size = config.parallel.tensor_parallel_size
    threads = config.num_threads or max(physical_cores() // size, 1) if config.device == "cpu" else None
    devices, launch = devices_of(config.device, size), Launch.of_environment()
    return RankGroup(size, devices, threads, () if launch is None else gather(launch, size))


def devices_of(device: str, ranks: int) -> Sequence[str]:
    """One for each rank."""
    if device != "cuda":
        return [device] * ranks
    import torch

    found = torch.cuda.device_count()
    if os.environ.get(SHARE_GPUS) == "1":
        return [f"cuda:{rank % found}" for rank in range(ranks)]
    if found < ranks:
        raise ConfigError(
            f"tensor_parallel_size={ranks} needs as many GPUs, and this process sees {found}; use {found} or fewer"
        )
    return [f"cuda:{rank}" for rank in range(ranks)]


class MultiProcessExecutor:
    """Builds and loads the model on all ranks on construction. `target` is its class, "module:Class", which each rank
    imports; `cls` and `model_config` are what this process knows of it. `wait_for_kernels` is called before the first
    step.
    """

    def __init__(
        self,
        cls: Any,
        model_config: Any,
        checkpoint: Checkpoint,
        config: EngineConfig,
        wait_for_kernels: Callable[[], object],
        target: str,
    ) -> None:
        check_memory(cls, checkpoint, config)
        built = build_model(cls, checkpoint, config, "meta", model_config)
        groups = cache_groups(built.model)
        self.group = start_ranks(config)
        _open.add(self)
        try:
            with span("executors.load"):
                self.group.send(Build(str(checkpoint.path), target, config))
                self.group.answers(Done)
            with span("executors.wait_for_kernels"):
                wait_for_kernels()
            self.group.send(Profile())
            found = self.group.answers(Profiled)
            # Blocks are named alike on all ranks, so the smallest pool decides.
            num_blocks = tuple(min(pools) for pools in zip(*(one.num_blocks for one in found), strict=True))
            assert len(num_blocks) == len(shared_pools(groups))
            self.bytes_read = tuple(one.bytes_read for one in found)
            self.group.send(Allocate(num_blocks))
            self.group.answers(Done)
        except BaseException:
            self.close(0)
            raise
        self._last_plan = b""
        self._info = ModelInfo(
            architecture=checkpoint.architecture,
            vocab_size=built.config.vocab_size,
            max_model_len=min(one.max_model_len for one in found),
            groups=groups,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            dtype=config.model.dtype,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def launch(self, plan: StepPlan) -> StepPlan:
        self._send_plan(plan)
        return plan

    def launch_forward(self, plan: StepPlan) -> StepPlan:
        self._send_plan(plan, gated=True)
        return plan

    def launch_sample(self, handle: StepPlan, masks: RowMasks | None) -> None:
        self.group.send(Sample(masks))

    def _send_plan(self, plan: StepPlan, gated: bool = False) -> None:
        payload = messages.encode_plan(plan)
        unchanged = payload == self._last_plan
        self._last_plan = payload
        self.group.send(Step(plan.step, plan.max_seq_len, None if unchanged else payload, gated))

    def collect(self, handle: StepPlan) -> StepResult:
        """EngineDeadError when a rank has failed or is stuck: with several of them there is no going on."""
        return messages.to_result(self.group.result())

    def healthy(self) -> bool:
        """Waits for the steps in flight, whose results are dropped. A failed rank leaves nothing to go on with."""
        try:
            self.group.drain()
        except RapidInferError:
            return False
        return True

    def late_graphs(self) -> tuple[int, float]:
        """Of the rank that took longest."""
        board = self.group.board
        return int(board.late_graphs.max()), float(board.late_us.max()) / 1e6

    def on_failure(self, call: Callable[[RapidInferError], object]) -> None:
        """See `RankGroup.on_failure`."""
        self.group.on_failure(call)

    def close(self, grace: float = 4.0) -> None:
        """End the ranks."""
        _open.discard(self)
        self.group.close(grace)


_open: weakref.WeakSet[MultiProcessExecutor] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for executor in list(_open):
        executor.close()
