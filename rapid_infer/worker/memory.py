"""How much GPU memory the caches may take: all of the allowed share but what weights and the largest step need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rapid_infer.cache.budget import GIB
from rapid_infer.config import EngineConfig
from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.engine.step_plan import RowTokens, StepPlan, TokenLists
from rapid_infer.errors import ConfigError
from rapid_infer.worker.graph_runner import row_buckets, splits_context, token_buckets
from rapid_infer.worker.model_runner import ModelRunner

WORST = SamplingFeatures(random=True, truncated=True, min_p=True, penalties=True, bias=True, logprobs=20)
GRAPH_OVERHEAD = GIB // 2
"""What recorded graphs take beside their buffers, for sampling in its variants."""
BYTES_PER_RECORDED_OP = 64 * 1024
"""An estimate: nodes of a graph live in device memory. 20 decode graphs of 36 layers, with their sample graphs and
buffers, took 0.97 GiB on an H200."""


MORE_ROOM = (
    "For more room try a higher gpu_memory_utilization, ending other processes on the GPU, or a lower "
    "max_num_batched_tokens, max_num_seqs or max_model_len"
)


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of one GPU. `weights` counts all that is allocated before a step; `other` is held outside the allocator.

    `step` is the peak of the largest step over that, `graphs` what recorded graphs will keep.
    """

    total: int
    utilization: float
    weights: int
    other: int
    step: int
    graphs: int

    @property
    def cache(self) -> int:
        """What is left for the caches; below zero when nothing is."""
        return int(self.total * self.utilization) - self.weights - self.other - self.step - self.graphs

    def check(self, kv_cache_memory_bytes: int | None) -> None:
        """ConfigError when a cache of that size, asked for whatever the utilization, leaves no room for a step."""
        room = self.total - self.weights - self.other - self.step
        if kv_cache_memory_bytes is not None and kv_cache_memory_bytes > room:
            raise ConfigError(
                f"kv_cache_memory_bytes={kv_cache_memory_bytes} is more than the GPU has left beside weights and the "
                f"largest step, {max(room, 0)} bytes. {self}. Lower it, or leave it out. {MORE_ROOM}"
            )

    def __str__(self) -> str:
        parts = (
            ("weights and tables", self.weights),
            ("the largest step", self.step),
            ("CUDA graphs", self.graphs),
            ("CUDA itself and other processes", self.other),
        )
        taken = ", ".join(f"{size / GIB:.2f} for {name}" for name, size in parts)
        return (
            f"GPU memory: {self.total / GIB:.2f} GiB x gpu_memory_utilization {self.utilization:g} = "
            f"{self.total * self.utilization / GIB:.2f} GiB; {taken}; {self.cache / GIB:.2f} GiB left for the KV cache"
        )


def measure(runner: ModelRunner, config: EngineConfig) -> MemoryProfile:
    """Run the largest step there can be, through the same code as any other; small caches must be bound.

    Every row reads and writes block 0 only, which belongs to nobody.
    """
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scheduler = config.scheduler
    plan = largest_step(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, runner.max_model_len)
    runner.collect(runner.launch(plan))
    step = torch.cuda.max_memory_allocated() - before
    # Mixed steps are recorded up to the largest, in a pool of their own.
    graphs = step + GRAPH_OVERHEAD + _nodes(runner, config) if config.cuda_graphs else 0
    runner.device_rows.length.zero_()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    other = total - free - torch.cuda.memory_reserved()
    return MemoryProfile(total, config.cache.gpu_memory_utilization, before, other, step, graphs)


def _nodes(runner: ModelRunner, config: EngineConfig) -> int:
    rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    kinds = 2 if splits_context(runner.model) else 1
    graphs = len(row_buckets(rows)) + kinds * len(token_buckets(tokens))
    return graphs * len(runner.ops.bound) * BYTES_PER_RECORDED_OP


def largest_step(rows: int, tokens: int, max_model_len: int) -> StepPlan:
    """A step of `tokens` tokens over `rows` rows, each as long as it can be and all with every sampling feature."""
    query_lens = np.full(rows, tokens // rows, np.int32)
    query_lens[rows - tokens % rows :] += 1
    query_lens = np.minimum(query_lens, max_model_len)
    numbers, none = np.arange(rows, dtype=np.int32), np.zeros(0, np.int32)
    one = RowTokens(numbers, np.zeros(rows, np.int32), np.zeros(rows, np.int32))
    nothing = RowTokens(none, none, none)
    return StepPlan(
        step=0,
        rows=numbers,
        query_lens=query_lens,
        tokens=np.zeros(int(query_lens.sum()), np.int32),
        sampled=numbers,
        new_rows=None,
        new_blocks=(),
        features=WORST,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(query_lens.max()),
        num_tokens=int(query_lens.sum()),
        token_lists=TokenLists(nothing, one, np.zeros(rows, np.float32), one, nothing),
    )
