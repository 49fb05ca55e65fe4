"""One rank in the caller's process. Opens no process group, whatever the environment says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rapid_infer.config import EngineConfig
from rapid_infer.engine.executor import ModelInfo
from rapid_infer.engine.step_plan import RowMasks, StepPlan, StepResult
from rapid_infer.errors import RapidInferError
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.parallel import ParallelState
from rapid_infer.profiling import span
from rapid_infer.worker.build import plan_cache
from rapid_infer.worker.capacity import check_memory, refuses_out_of_memory
from rapid_infer.worker.model_runner import StepHandle
from rapid_infer.worker.worker import Worker


class InProcessExecutor:
    """Builds and loads the model on construction, see `Worker`. ConfigError when it cannot fit the device.

    `wait_for_kernels` is called before the first step. `parallel`: to time one rank of several by itself; its
    collectives must be empty.
    """

    @refuses_out_of_memory
    def __init__(
        self,
        cls: Any,
        model_config: Any,
        checkpoint: Checkpoint,
        config: EngineConfig,
        wait_for_kernels: Callable[[], object],
        parallel: ParallelState | None = None,
    ) -> None:
        self.worker = worker = Worker(cls, model_config, checkpoint, config, parallel)
        check_memory(cls, checkpoint, config)
        worker.build()
        worker.load()
        with span("executors.wait_for_kernels"):
            wait_for_kernels()
        self.built, self.runner = worker.built, worker.runner
        self.memory = worker.profile()
        self.cache_plan, max_model_len = plan_cache(config, worker.groups, self.memory)
        worker.allocate(self.cache_plan.num_blocks)
        worker.capture()
        self._info = ModelInfo(
            architecture=checkpoint.architecture,
            vocab_size=self.built.config.vocab_size,
            max_model_len=max_model_len,
            groups=worker.groups,
            num_blocks=self.cache_plan.num_blocks,
            block_size=self.cache_plan.block_size,
            dtype=config.model.dtype,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def launch(self, plan: StepPlan) -> StepHandle:
        return self.runner.launch(plan)

    def launch_forward(self, plan: StepPlan) -> StepHandle:
        return self.runner.launch_forward(plan)

    def launch_sample(self, handle: StepHandle, masks: RowMasks | None) -> None:
        self.runner.launch_sample(handle, masks)

    def collect(self, handle: StepHandle) -> StepResult:
        return self.runner.collect(handle)

    def healthy(self) -> bool:
        """Whether the device still answers after a failed step; waits for what it is at."""
        return self.worker.healthy()

    def late_graphs(self) -> tuple[int, float]:
        """(CUDA graphs that were recorded after the start, seconds that took)."""
        return self.worker.late_graphs

    def on_failure(self, call: Callable[[RapidInferError], object]) -> None:
        """What fails here fails in a call."""

    def close(self) -> None:
        """Drop model, graphs and caches."""
        self.worker.close()
