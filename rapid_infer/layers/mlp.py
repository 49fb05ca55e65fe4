"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from rapid_infer.layers.module import LayerModule
from rapid_infer.parallel.partial_sum import PartialSum


class GatedMLP(LayerModule):
    """`down(silu(gate(x)) * up(x))`; `gate_up_proj` holds both, gate first. x and result `[tokens, hidden]`.

    `defer`: see `RowParallelLinear`.
    """

    def __init__(
        self, ctx: BuildContext, hidden_size: int, intermediate_size: int, bias: bool = False, defer: bool = False
    ) -> None:
        super().__init__()
        sizes = [intermediate_size, intermediate_size]
        self.gate_up_proj = MergedColumnParallelLinear(ctx.sub("gate_up_proj"), hidden_size, sizes, bias)
        self.down_proj = RowParallelLinear(ctx.sub("down_proj"), intermediate_size, hidden_size, bias, defer)
        self._activation = ctx.op("silu_and_mul")
        gated = None if bias else getattr(self.gate_up_proj.quant, "gated", None)
        self._fused: Callable[[Tensor], Tensor] | None = None if gated is None else gated(ctx)

    def forward(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor | PartialSum:
        """`batch` is not looked at: it lets a layer call this and a mixture of experts alike."""
        if self._fused is not None:
            return self.down_proj(self._fused(x))
        return self.down_proj(self._activation(self.gate_up_proj(x)))
