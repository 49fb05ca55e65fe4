"""Linear layers of 8-bit integers with a scale for each row: `weight` int8 `[out, in]`, `weight_scale` fp32 `[out, 1]`.

For checkpoints whose config.json has {"quantization_config": {"quant_method": "int8-rows"}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.quant import OUT, Dim, ParamSpec, PlainMethod, PlainScheme, QuantMethod, StoredModules


class Int8Linear:
    """Integers of 8 bits are exact in bf16: rows are scaled after the product, and nothing is rounded twice."""

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        self.dtype = dtype
        return {
            "weight": ParamSpec(torch.int8),
            # One entry for each output, and one for all inputs: the layer cuts it over ranks and parts by this.
            "weight_scale": ParamSpec(torch.float32, (OUT, Dim("input", None))),
        }

    def bind(self, layer: Any, ctx: Any) -> None:
        pass

    def finalize(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight.to(x.dtype)) * layer.weight_scale.squeeze(1).to(x.dtype)

    def dequantize(self, layer: Any) -> Tensor:
        return (layer.weight.float() * layer.weight_scale).to(self.dtype)


class Int8Scheme(PlainScheme):
    """Experts and the head stay as PlainScheme has them."""

    name = "int8-rows"

    def __init__(self, modules: StoredModules) -> None:
        self.modules = modules

    @classmethod
    def from_config(cls, config: Mapping[str, Any], modules: StoredModules) -> Int8Scheme:
        return cls(modules)

    def method(self, module: str) -> QuantMethod:
        # What the files hold decides, module by module.
        parts = self.modules.of(module)
        return Int8Linear() if parts and all(part.quantized for part in parts) else PlainMethod()
