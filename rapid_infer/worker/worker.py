"""One rank: a model on its device, brought up in phases, between which ranks agree on what all must share."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from rapid_infer.cache.budget import GIB
from rapid_infer.config import EngineConfig
from rapid_infer.device import set_num_threads
from rapid_infer.loader.progress import Progress, terminal_bar
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.parallel import ParallelState
from rapid_infer.profiling import traced
from rapid_infer.worker import build
from rapid_infer.worker.contract import try_forward
from rapid_infer.worker.memory import MemoryProfile, measure
from rapid_infer.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class Worker:
    """`build`, `load`, `profile`, `allocate` and `capture`, in this order; then `runner` takes steps.

    `cls` is the plugin's model class, `model_config` what its `read_config` returned. `parallel` and `device` are this
    rank's among several; alone it takes the configuration's device.
    """

    built: build.BuiltModel
    runner: ModelRunner

    def __init__(
        self,
        cls: Any,
        model_config: Any,
        checkpoint: Checkpoint,
        config: EngineConfig,
        parallel: ParallelState | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._cls, self._model_config, self._checkpoint, self.config = cls, model_config, checkpoint, config
        self.parallel = parallel or ParallelState()
        self.device = device or torch.device(config.device)

    def build(self) -> None:
        """The model, its parameters not filled."""
        if self.device.type == "cpu":
            set_num_threads(self.config.num_threads)
        model = self._cls, self._checkpoint, self.config, self.device, self._model_config
        self.built = build.build_model(*model, self.parallel)
        self.groups = build.cache_groups(self.built.model)

    def load(self, progress: Progress = terminal_bar) -> None:
        """Fill the parameters, and make the tables of the rows. WeightError."""
        build.load(self.built, self._checkpoint, self.config, progress)
        config = self.config
        self.runner = ModelRunner(
            self.built.model,
            self.device,
            self.built.ops,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            num_groups=len(self.groups),
            queue_depth=config.scheduler.queue_depth,
            vocab_size=self.built.config.vocab_size,
        )

    @traced("worker.profile_memory")
    def profile(self) -> MemoryProfile | None:
        """What the largest step takes, with all kernels there; None for a CPU, where nothing is measured."""
        if self.device.type != "cuda":
            return None
        build.allocate_caches(self.built.model, 2, self.config.cache.block_size, self.device)
        profile = measure(self.runner, self.config)
        logger.info("%s", profile)
        return profile

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """The caches, `num_blocks` of each pool, the same on every rank. PluginError when a first forward fails."""
        build.allocate_caches(self.built.model, num_blocks, self.config.cache.block_size, self.device)
        if self.device.type != "cuda":
            # Elsewhere the largest step was the first.
            try_forward(self.runner, self._checkpoint.architecture)

    @traced("worker.capture_graphs")
    def capture(self) -> None:
        """Record steps, where they are to be replayed."""
        if not self.config.cuda_graphs:
            return
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        self.runner.capture(self.config.scheduler.max_num_batched_tokens)
        assert self.runner.graphs is not None
        logger.info(
            "CUDA graphs: %d for decode steps of up to %d rows, %d for mixed ones, recorded in %.1f s, %.2f GiB",
            self.runner.graphs.recorded["decode"],
            self.runner.device_rows.padding_row,
            self.runner.graphs.recorded["mixed"],
            time.perf_counter() - started,
            (free - torch.cuda.mem_get_info()[0]) / GIB,
        )

    @property
    def late_graphs(self) -> tuple[int, float]:
        """(CUDA graphs that were recorded after the start, seconds that took)."""
        graphs = self.runner.graphs
        return (0, 0.0) if graphs is None else (graphs.late.count, graphs.late.seconds)

    def healthy(self) -> bool:
        """Whether the device still answers after a failed step; waits for what it is at."""
        try:
            torch.zeros(1, device=self.device).item()
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Drop model, graphs and caches."""
        self.runner.close()
        self.built.model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
