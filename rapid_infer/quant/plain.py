"""Unquantized weights: one matrix in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rapid_infer.ops.registry import REFERENCE, BoundOp
from rapid_infer.quant.method import ExpertsMethod, HeadMethod, OpContext, QuantMethod
from rapid_infer.quant.param_spec import ParamSpec


class PlainFormat:
    """weight `[out, in]` in bf16, fp16 or fp32."""

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(dtype)}

    def finalize(self, layer: nn.Module) -> None:
        pass


class PlainMethod(PlainFormat):
    """weight `[out, in]`, kept in the layout that the chosen provider of `linear` wants."""

    linear: BoundOp
    operand: Tensor

    def bind(self, layer: nn.Module, ctx: OpContext) -> None:
        self.linear = ctx.op("linear")
        self.operand = layer.get_parameter("weight")

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.linear(x, self.operand)

    def dequantize(self, layer: nn.Module) -> Tensor:
        return layer.get_parameter("weight").data

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


class PlainExperts(PlainFormat):
    """weight `[experts, out, in]` of both products."""

    def bind(self, layer: Any, ctx: OpContext) -> None:
        gate_up = layer.gate_up_proj
        self._run = ctx.op(
            "fused_experts",
            experts=len(gate_up.experts.expert_map),
            hidden_size=gate_up.layout.ins.size,
            intermediate_size=gate_up.layout.outs[0].size,
        )

    def apply(self, layer: Any, x: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None) -> Tensor:
        return self._run(x, layer.gate_up_proj.weight, layer.down_proj.weight, weights, slots, shared)


class PlainHead(PlainFormat):
    """weight `[rows, hidden]`, which an embedding may share, and copies of it in layouts that providers want."""

    def __init__(self) -> None:
        self.packed: dict[Callable[[Tensor], Tensor], Tensor] = {}

    def bind(self, layer: nn.Module, ctx: OpContext) -> None:
        self.scores, self.best = ctx.op("lm_head"), ctx.op("lm_head_argmax")

    def finalize(self, layer: nn.Module) -> None:
        for prepare in self._layouts():
            # A second copy: an embedding that shares the matrix needs it as it was.
            self.packed[prepare] = prepare(layer.get_parameter("weight").data)

    def packed_bytes(self, layer: nn.Module) -> int:
        return len(self._layouts()) * layer.get_parameter("weight").nbytes

    def logits(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        return self.scores(hidden, self._operand(layer, self.scores))

    def argmax(self, layer: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.best(hidden, self._operand(layer, self.best))

    def _layouts(self) -> list[Callable[[Tensor], Tensor]]:
        prepared = (op.prepare for op in (self.scores, self.best) if op.prepare is not None)
        return list(dict.fromkeys(prepared))

    def _operand(self, layer: Any, op: BoundOp) -> Tensor:
        packed = None if op.prepare is None else self.packed.get(op.prepare)
        return layer.weight if packed is None else packed


class PlainScheme:
    name = "none"

    def method(self, module: str) -> QuantMethod:
        return PlainMethod()

    def experts(self, module: str) -> ExpertsMethod:
        return PlainExperts()

    def head(self, module: str) -> HeadMethod:
        return PlainHead()
