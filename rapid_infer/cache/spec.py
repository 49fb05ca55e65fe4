"""What one layer caches. Modules with equal specs form groups, each with one block table per row.

The engine sees specs only through `policy`, and memory through `page_bytes` and `layout`; no one asks what they serve.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from rapid_infer.cache.groups import GroupPolicy, WindowPolicy, blocks_for

__all__ = ["MLAKV", "CacheGroup", "CacheSpec", "FullKV", "blocks_for"]

KEY_TILE = 256
"""Attention reads whole tiles of keys, of at most this many: a window's first tile begins before the window. What it
reads there has no weight, but must be this row's own: 0 times another row's NaN is NaN."""

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class CacheSpec:
    """A frozen dataclass: equality decides the grouping. As it stands, a block holds `block_size` tokens, all kept."""

    dtype: str
    """Name of the element type, such as "bfloat16"."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes one more token takes in one layer."""
        raise NotImplementedError

    @property
    def storage(self) -> Hashable:
        """Groups where this is equal take their blocks from one pool, and lie in one tensor."""
        return self

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block in one layer."""
        return block_size * self.bytes_per_token

    def layout(self, layers: int, blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of a pool's one tensor; its first dimension is the layer."""
        raise NotImplementedError

    def policy(self, block_size: int) -> GroupPolicy:
        """Which blocks a request needs."""
        return GroupPolicy(block_size)


@dataclass(frozen=True)
class FullKV(CacheSpec):
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

    @property
    def storage(self) -> Hashable:
        return replace(self, window=None)

    def policy(self, block_size: int) -> GroupPolicy:
        if self.window is None:
            return super().policy(block_size)
        return WindowPolicy(block_size, self.window + KEY_TILE - 1)


@dataclass(frozen=True)
class MLAKV(CacheSpec):
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


@dataclass(frozen=True)
class CacheGroup:
    """`layers` modules that share one spec and one block table per row."""

    spec: CacheSpec
    layers: int

    def bytes_per_token(self) -> int:
        return self.layers * self.spec.bytes_per_token

    def page_bytes(self, block_size: int) -> int:
        return self.layers * self.spec.page_bytes(block_size)
