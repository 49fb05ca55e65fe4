"""Unquantized weights: one matrix in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rapid_infer.ops.registry import REFERENCE, BoundOp
from rapid_infer.quant.method import OpContext, QuantMethod
from rapid_infer.quant.param_spec import ParamSpec


class PlainMethod:
    """weight `[out, in]` in bf16, fp16 or fp32, kept in the layout that the chosen provider of `linear` wants."""

    linear: BoundOp
    operand: Tensor

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(dtype)}

    def bind(self, layer: nn.Module, ctx: OpContext) -> None:
        self.linear = ctx.op("linear")
        self.operand = layer.get_parameter("weight")

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.linear(x, self.operand)

    def gated(self, ctx: OpContext) -> Callable[[Tensor], Tensor] | None:
        """`silu_and_mul(apply(layer, x))` as one operator; None where only the two in a row would run."""
        fused = ctx.op("linear_silu_and_mul")
        # A subclass that multiplies differently has inherited this, and a packed weight is linear's own.
        if fused.provider == REFERENCE or self.linear.prepare is not None or type(self) is not PlainMethod:
            return None
        return lambda x: fused(x, self.operand)

    def finalize(self, layer: nn.Module) -> None:
        if self.linear.prepare is not None:
            weight = layer.get_parameter("weight")
            self.operand = self.linear.prepare(weight.data)
            # The packed copy replaces the parameter: both would take twice the memory.
            weight.data = torch.empty(0, dtype=weight.dtype)


class PlainScheme:
    name = "none"

    def method(self, module: str) -> QuantMethod:
        return PlainMethod()
