"""One rank in the caller's process. Opens no process group, whatever the environment says."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from rapid_infer.cache.budget import GIB
from rapid_infer.config import EngineConfig
from rapid_infer.device import gpu_facts, set_num_threads
from rapid_infer.engine.executor import ModelInfo
from rapid_infer.engine.step_plan import RowMasks, StepPlan, StepResult
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.profiling import traced
from rapid_infer.worker import build
from rapid_infer.worker.capacity import check_memory, refuses_out_of_memory
from rapid_infer.worker.contract import try_forward
from rapid_infer.worker.kernel_compiler import KernelCompiler, terminal_count
from rapid_infer.worker.memory import MemoryProfile, measure
from rapid_infer.worker.model_runner import ModelRunner, StepHandle

logger = logging.getLogger(__name__)


class InProcessExecutor:
    """Builds and loads the model on construction. `cls` is the plugin's model class."""

    @refuses_out_of_memory
    def __init__(
        self, cls: Any, checkpoint: Checkpoint, config: EngineConfig, compiler: KernelCompiler | None = None
    ) -> None:
        device = torch.device(config.device)
        if device.type == "cpu":
            set_num_threads(config.num_threads)
        model_config = cls.read_config(checkpoint.hf_config)
        if compiler is not None:
            compiler.aim(config, model_config, gpu_facts(device))
        check_memory(cls, checkpoint, config)
        self.built = build.build_model(cls, checkpoint, config, device, model_config)
        build.load(self.built, checkpoint, config)
        groups = build.cache_groups(self.built.model)
        self.runner = ModelRunner(
            self.built.model,
            device,
            self.built.ops,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            num_groups=len(groups),
            queue_depth=config.scheduler.queue_depth,
            vocab_size=self.built.config.vocab_size,
        )
        if compiler is not None:
            self._wait_for_kernels(compiler)
        self.memory = self._profile(config) if device.type == "cuda" else None
        self.cache_plan, max_model_len = build.plan_cache(config, groups, self.memory)
        build.allocate_caches(self.built.model, self.cache_plan.num_blocks, self.cache_plan.block_size, device)
        if self.memory is None:
            try_forward(self.runner, checkpoint.architecture)
        if config.cuda_graphs:
            self._capture(config)
        self._info = ModelInfo(
            architecture=checkpoint.architecture,
            vocab_size=self.built.config.vocab_size,
            max_model_len=max_model_len,
            groups=groups,
            num_blocks=self.cache_plan.num_blocks,
            block_size=self.cache_plan.block_size,
            dtype=config.model.dtype,
        )

    @traced("executors.wait_for_kernels")
    def _wait_for_kernels(self, compiler: KernelCompiler) -> None:
        compiler.wait(terminal_count)

    @traced("executors.profile_memory")
    def _profile(self, config: EngineConfig) -> MemoryProfile:
        build.allocate_caches(self.built.model, 2, config.cache.block_size, self.runner.device)
        profile = measure(self.runner, config)
        logger.info("%s", profile)
        return profile

    @traced("executors.capture_graphs")
    def _capture(self, config: EngineConfig) -> None:
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        self.runner.capture(config.scheduler.max_num_batched_tokens)
        assert self.runner.graphs is not None
        logger.info(
            "CUDA graphs: %d for decode steps of up to %d rows, %d for mixed ones, recorded in %.1f s, %.2f GiB",
            self.runner.graphs.recorded["decode"],
            self.runner.table.dummy,
            self.runner.graphs.recorded["mixed"],
            time.perf_counter() - started,
            (free - torch.cuda.mem_get_info()[0]) / GIB,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def launch(self, plan: StepPlan) -> StepHandle:
        return self.runner.launch(plan)

    def launch_forward(self, plan: StepPlan) -> StepHandle:
        return self.runner.launch_forward(plan)

    def launch_finish(self, handle: StepHandle, masks: RowMasks | None) -> None:
        self.runner.launch_finish(handle, masks)

    def collect(self, handle: StepHandle) -> StepResult:
        return self.runner.collect(handle)

    def healthy(self) -> bool:
        """Whether the device still answers after a failed step; waits for what it is at."""
        try:
            torch.zeros(1, device=self.runner.device).item()
        except RuntimeError:
            return False
        return True

    def late_graphs(self) -> tuple[int, float]:
        """(CUDA graphs that were recorded after the start, seconds that took)."""
        graphs = self.runner.graphs
        return (0, 0.0) if graphs is None else (graphs.late.count, graphs.late.seconds)

    def close(self) -> None:
        """Drop model, graphs and caches."""
        self.runner.close()
        self.built.model = None
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()
