"""What one layer caches per token. Modules with equal specs form a group: one tensor, one block table per row.

The engine sees specs only through `page_bytes`, `longest_resume` and `layout`; it never asks which attention they
serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class CacheSpec(Protocol):
    """Frozen and hashable: equality decides the grouping."""

    @property
    def dtype(self) -> str:
        """Name of the element type, such as "bfloat16"."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        ...

    def layout(self, layers: int, blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the group's one tensor; its first dimension is the layer."""
        ...

    def longest_resume(self, hashes: Sequence[bytes], cached: Callable[[bytes], bool]) -> int:
        """How many leading blocks can be taken over, given the prompt's block hashes and which of them are cached."""
        ...

    @property
    def max_rollback(self) -> int | None:
        """How many tokens can be taken back after they were written; None for any number."""
        ...


def _leading(hashes: Sequence[bytes], cached: Callable[[bytes], bool]) -> int:
    for i, digest in enumerate(hashes):
        if not cached(digest):
            return i
    return len(hashes)


@dataclass(frozen=True)
class FullKV:
    """Keys and values of every token: `[layers, 2 (K, V), blocks, block_size, kv_heads, head_dim]`.

    `kv_heads` is this rank's count. `window` is part of the spec, so layers with and without one form two groups.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.dtype]

    def layout(self, layers: int, blocks: int, block_size: int) -> tuple[int, ...]:
        return (layers, 2, blocks, block_size, self.kv_heads, self.head_dim)

    def longest_resume(self, hashes: Sequence[bytes], cached: Callable[[bytes], bool]) -> int:
        return _leading(hashes, cached)

    @property
    def max_rollback(self) -> int | None:
        return None


@dataclass(frozen=True)
class LatentKV:
    """A latent and a rope key that all heads share: `[layers, blocks, block_size, rank + rope_dim]`.

    Every rank holds the same values: tensor parallelism does not divide them.
    """

    rank: int
    rope_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return (self.rank + self.rope_dim) * ELEMENT_BYTES[self.dtype]

    def layout(self, layers: int, blocks: int, block_size: int) -> tuple[int, ...]:
        return (layers, blocks, block_size, self.rank + self.rope_dim)

    def longest_resume(self, hashes: Sequence[bytes], cached: Callable[[bytes], bool]) -> int:
        return _leading(hashes, cached)

    @property
    def max_rollback(self) -> int | None:
        return None


@dataclass(frozen=True)
class CacheGroup:
    """`layers` modules that share one spec, hence one tensor and one block table per row."""

    spec: CacheSpec
    layers: int

    def bytes_per_token(self) -> int:
        return self.layers * self.spec.bytes_per_token

    def page_bytes(self, block_size: int) -> int:
        return block_size * self.bytes_per_token()


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return math.ceil(tokens / block_size)
