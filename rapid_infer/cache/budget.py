"""How much memory the caches get, and how many blocks that is: arithmetic on numbers that the worker measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapid_infer.cache.spec import CacheGroup, blocks_for
from rapid_infer.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True)
class CachePlan:
    """`num_blocks` includes block 0 (padding). All groups have the same number of blocks: a row needs one of each."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    budget: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, over all requests."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def __str__(self) -> str:
        return (
            f"KV cache: {self.num_blocks} blocks x {self.block_size} tokens x "
            f"{self.bytes_per_block // self.block_size} bytes/token = {self.total_bytes / GIB:.2f} GiB "
            f"({self.num_tokens} tokens)"
        )


def plan_blocks(groups: Sequence[CacheGroup], block_size: int, budget: int) -> CachePlan:
    """As many blocks as `budget` bytes hold."""
    bytes_per_block = sum(group.page_bytes(block_size) for group in groups)
    return CachePlan(max(budget // bytes_per_block, 0), block_size, bytes_per_block, budget)


def fit_model_len(plan: CachePlan, max_model_len: int, *, shrink: bool) -> int:
    """The longest sequence the pool can hold.

    ConfigError, with the arithmetic, when it is too small and may not shrink.
    """
    need = blocks_for(max_model_len, plan.block_size) + 1
    if plan.num_blocks >= need:
        return max_model_len
    if shrink and plan.num_blocks >= 2:
        return plan.num_tokens
    raise ConfigError(
        f"the KV cache is too small for one request of max_model_len={max_model_len}: it needs {need} blocks of "
        f"{plan.block_size} tokens x {plan.bytes_per_block} bytes = {need * plan.bytes_per_block} bytes, and has "
        f"{plan.budget} bytes = {plan.num_blocks} blocks; lower max_model_len or raise kv_cache_memory_bytes"
    )
