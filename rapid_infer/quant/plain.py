"""Unquantized weights: one matrix in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rapid_infer.quant.method import ParamSpec, QuantMethod


class PlainMethod:
    """weight `[out, in]` in bf16, fp16 or fp32."""

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(dtype)}

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight)  # type: ignore[arg-type]

    def finalize(self, layer: nn.Module) -> None:
        pass


class PlainScheme:
    name = "none"

    def method(self, module: str) -> QuantMethod:
        return PlainMethod()
