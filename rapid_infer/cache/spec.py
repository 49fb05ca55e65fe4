"""What one layer caches. Modules with equal specs form groups, each with one block table per row.

The engine sees specs only through `policy`, and memory through `page_bytes` and `layout`; no one asks what they serve.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from rapid_infer.cache.groups import GroupPolicy, WindowPolicy, blocks_for

__all__ = ["KV_CACHE_DTYPES", "MLAKV", "CacheGroup", "CacheSpec", "FullKV", "LatentRecord", "blocks_for"]

KEY_TILE = 256
"""Attention reads whole tiles of keys, of at most this many: a window's first tile begins before the window. What it
reads there has no weight, but must be this row's own: 0 times another row's NaN is NaN."""

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}

KV_CACHE_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "nvfp4": "nvfp4"}
"""What `CacheSpec.dtype` is for a value of the option `kv_cache_dtype`."""
NVFP4_GROUP = 16
"""Features of a head that share a scale."""


class CacheSpec:
    """A frozen dataclass: equality decides the grouping. As it stands, a block holds `block_size` tokens, all kept."""

    dtype: str
    """Name of the element type, such as "bfloat16", or of a layout in bytes ("nvfp4")."""

    @property
    def element(self) -> str:
        """Name of the tensor's type."""
        return self.dtype if self.dtype in ELEMENT_BYTES else "uint8"

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
    With "nvfp4" the last dimension is bytes: e2m1 codes of `head_dim` features, the even one of two in the lower half
    of a byte, then their e4m3 scales, one for 16.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.width * ELEMENT_BYTES[self.element]

    @property
    def width(self) -> int:
        """Elements of one head's key."""
        return self.head_dim // 2 + self.head_dim // NVFP4_GROUP if self.dtype == "nvfp4" else self.head_dim

    def layout(self, layers: int, blocks: int, block_size: int) -> tuple[int, ...]:
        return (layers, 2, blocks, block_size, self.kv_heads, self.width)

    @property
    def storage(self) -> Hashable:
        return replace(self, window=None)

    def policy(self, block_size: int) -> GroupPolicy:
        if self.window is None:
            return super().policy(block_size)
        return WindowPolicy(block_size, self.window + KEY_TILE - 1)


@dataclass(frozen=True)
class LatentRecord:
    """Bytes of a latent entry in FP8: `rank` e4m3 values, the rope key in bf16, and the latent's fp32 scale.

    The rope key stays in 16 bits, since rounding it costs most in long contexts. 656 bytes for 512 + 64 features.
    """

    rank: int
    rope_dim: int

    @property
    def rope_at(self) -> int:
        return _up(self.rank, 4)

    @property
    def scale_at(self) -> int:
        return _up(self.rope_at + 2 * self.rope_dim, 4)

    @property
    def width(self) -> int:
        """Whole vectors of 16 bytes, so that every entry begins at one."""
        return _up(self.scale_at + 4, 16)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class MLAKV(CacheSpec):
    """A latent and a rope key that all heads share: `[layers, blocks, block_size, rank + rope_dim]`.

    Every rank holds the same values: tensor parallelism does not divide them. With "float8_e4m3fn" an entry is the
    bytes of a `LatentRecord`.
    """

    rank: int
    rope_dim: int
    dtype: str

    @property
    def element(self) -> str:
        return "uint8" if self.dtype == "float8_e4m3fn" else self.dtype

    @property
    def width(self) -> int:
        """Elements of an entry."""
        return LatentRecord(self.rank, self.rope_dim).width if self.element == "uint8" else self.rank + self.rope_dim

    @property
    def bytes_per_token(self) -> int:
        return self.width * ELEMENT_BYTES[self.element]

    def layout(self, layers: int, blocks: int, block_size: int) -> tuple[int, ...]:
        return (layers, blocks, block_size, self.width)


@dataclass(frozen=True)
class CacheGroup:
    """`layers` modules that share one spec and one block table per row."""

    spec: CacheSpec
    layers: int

    def bytes_per_token(self) -> int:
        return self.layers * self.spec.bytes_per_token

    def page_bytes(self, block_size: int) -> int:
        return self.layers * self.spec.page_bytes(block_size)
