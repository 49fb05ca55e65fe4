"""One rank in the caller's process. Opens no process group, whatever the environment says."""

from __future__ import annotations

import logging
from typing import Any

import torch

from rapid_infer.config import EngineConfig
from rapid_infer.device import set_num_threads
from rapid_infer.engine.executor import ModelInfo
from rapid_infer.engine.step_plan import StepPlan, StepResult
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.worker import build
from rapid_infer.worker.model_runner import ModelRunner, StepHandle

logger = logging.getLogger(__name__)


class InProcessExecutor:
    """Builds and loads the model on construction. `cls` is the plugin's model class."""

    def __init__(self, cls: Any, checkpoint: Checkpoint, config: EngineConfig) -> None:
        device = torch.device(config.device)
        if device.type == "cpu":
            set_num_threads(config.num_threads)
        self.built = build.build_model(cls, checkpoint, config, device)
        build.load(self.built, checkpoint, config)
        groups = build.cache_groups(self.built.model)
        self.cache_plan, max_model_len = build.plan_cache(config, groups)
        build.allocate_caches(self.built.model, self.cache_plan, device)
        self.runner = ModelRunner(
            self.built.model,
            device,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.cache_plan.block_size,
            num_groups=len(groups),
            queue_depth=config.scheduler.queue_depth,
            vocab_size=self.built.config.vocab_size,
        )
        self._info = ModelInfo(
            architecture=checkpoint.architecture,
            vocab_size=self.built.config.vocab_size,
            max_model_len=max_model_len,
            groups=groups,
            num_blocks=self.cache_plan.num_blocks,
            block_size=self.cache_plan.block_size,
            dtype=config.model.dtype,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def launch(self, plan: StepPlan) -> StepHandle:
        return self.runner.launch(plan)

    def collect(self, handle: StepHandle) -> StepResult:
        return self.runner.collect(handle)

    def healthy(self) -> bool:
        """Whether the device still answers after a failed step."""
        try:
            torch.zeros(1, device=self.runner.device).item()
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Drop model and caches."""
        self.runner.model = None
        self.built.model = None
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()
