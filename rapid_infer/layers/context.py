"""What a module needs to build itself, passed down explicitly and named after where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rapid_infer.cache.spec import KV_CACHE_DTYPES
from rapid_infer.ops.registry import BoundOp, OpResolver
from rapid_infer.parallel.state import ParallelState
from rapid_infer.quant.method import QuantMethod, QuantScheme
from rapid_infer.quant.plain import PlainScheme

if TYPE_CHECKING:
    from rapid_infer.layers.stack import LayerStack


@dataclass(frozen=True)
class BuildContext:
    """Parallel state, dtype, quantization, op resolver and the module's dotted `name`.

    `max_positions` is the longest sequence the engine will run, `block_size` the tokens of one cache block (None: not
    known, and some attention providers must know it), `kv_cache_dtype` the engine's option. `shared` holds what all
    layers of one model share (rope tables).
    """

    dtype: torch.dtype
    ops: OpResolver
    max_positions: int
    parallel: ParallelState = field(default_factory=ParallelState)
    quant: QuantScheme = field(default_factory=PlainScheme)
    name: str = ""
    shared: dict[Any, torch.Tensor] = field(default_factory=dict)
    block_size: int | None = None
    kv_cache_dtype: str | None = None

    @property
    def cache_dtype(self) -> str:
        """The `CacheSpec.dtype` of keys and values."""
        stored = self.kv_cache_dtype
        return str(self.dtype).removeprefix("torch.") if stored is None else KV_CACHE_DTYPES[stored]

    def sub(self, name: str) -> BuildContext:
        """The context of the submodule stored as attribute `name`."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def layers(self, n: int, build: Callable[[BuildContext, int], nn.Module], name: str = "layers") -> LayerStack:
        """Build this pipeline stage's layers of n, `build(ctx, i)` for each global number i.

        The result is to be stored as attribute `name`.
        """
        from rapid_infer.layers.stack import LayerStack

        ctx = self.sub(name)
        layers = {i: build(ctx.sub(str(i)), i) for i in self.parallel.stage_layers(n)}
        return LayerStack(layers, n)

    def op(self, name: str, **info: Any) -> BoundOp:
        """The provider of op `name` for this layer; `info` is what the op asks a layer to say of itself."""
        return self.ops.bind(name, self.dtype, **info)

    def quant_method(self) -> QuantMethod:
        return self.quant.method(self.name)
