"""How layers store and apply matrices of any `Format`: one class each for linear layers, experts and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rapid_infer.errors import ConfigError
from rapid_infer.ops.reference.dequantize import dequantize
from rapid_infer.ops.registry import REFERENCE
from rapid_infer.quant.formats.base import Converted, Format
from rapid_infer.quant.method import OpContext
from rapid_infer.quant.param_spec import ParamSpec

EXACT_ROWS = 64
"""With at most so many tokens activations stay in 16 bits: bytes bind there, and that is more exact."""


Quantizer = Callable[[Tensor], Mapping[str, Tensor]]
"""Rounds plain weights `[..., out, in]` to the leaves of a format."""


class Quantized:
    """What is common: parameters as files have them, until `finalize` makes of them what operators take.

    `quantize`: files have plain weights, which become the parameters as they are read.
    """

    def __init__(self, format: Format, exact_rows: int = EXACT_ROWS, quantize: Quantizer | None = None) -> None:
        self.format, self.exact_rows, self.quantize = format, exact_rows, quantize

    @property
    def ignored(self) -> Mapping[str, str]:
        """Leaves that the format has no use for, each with the reason."""
        return self.format.ignored

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        self.dtype = dtype
        return self.format.params(dtype)

    def _take(self, layer: Any) -> Converted:
        """Converts the parameters, and gives them up."""
        leaves = {leaf: layer.get_parameter(leaf).data for leaf in self.format.params(self.dtype)}
        converted = self.format.convert(layer.stored_layout, leaves, layer.ctx_name)
        for leaf, values in leaves.items():
            layer.get_parameter(leaf).data = values.new_empty(0)
        matrix = converted.matrix
        # Layers of unlike kinds launch unlike kernels.
        layer.quant_kind = repr((self.format, matrix.shape, matrix.group, converted.order is None, matrix.zero is None))
        return converted


class QuantizedLinear(Quantized):
    def bind(self, layer: Any, ctx: OpContext) -> None:
        self.format.check(layer.stored_layout, layer.ctx_name)
        self._product = ctx.op("quantized_linear", form=self.format.form)

    def finalize(self, layer: nn.Module) -> None:
        self.converted = self._take(layer)

    def apply(self, layer: nn.Module, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._apply(x, out_dtype)

    def gated(self, ctx: OpContext) -> Callable[[Tensor], Tensor] | None:
        """See `PlainMethod.gated`."""
        # Whoever multiplies otherwise has no such product.
        if self._product.provider == REFERENCE or type(self).apply is not QuantizedLinear.apply:
            return None
        return lambda x: self._apply(x, None, gated=True)

    def _apply(self, x: Tensor, out_dtype: torch.dtype | None, gated: bool = False) -> Tensor:
        stored = self.converted
        if stored.multiplier is not None:
            x = x * stored.multiplier
        if stored.order is not None:
            x = (F.pad(x, (0, 1)) if len(stored.order) != x.shape[1] else x).index_select(1, stored.order)
        activation, given = self.format.activation, stored.input_scale
        return self._product(x, stored.matrix, activation, given, self.exact_rows, out_dtype, gated)

    def dequantize(self, layer: nn.Module) -> Tensor:
        stored = self._take(layer)
        weight = dequantize.reference(stored.matrix, self.dtype if stored.multiplier is None else torch.float32)
        if stored.order is not None:
            inputs = int(stored.order.max()) + 1
            weight = weight.new_empty(len(weight), inputs).index_copy_(1, stored.order, weight)
        return weight if stored.multiplier is None else (weight * stored.multiplier).to(self.dtype)


class QuantizedExperts(Quantized):
    def bind(self, layer: Any, ctx: OpContext) -> None:
        gate_up = layer.gate_up_proj
        for matrix in (gate_up, layer.down_proj):
            self.format.check(matrix.stored_layout, matrix.ctx_name)
        self._run = ctx.op(
            "quantized_experts",
            form=self.format.form,
            experts=len(gate_up.experts.expert_map),
            hidden_size=gate_up.layout.ins.size,
            intermediate_size=gate_up.layout.outs[0].size,
        )

    def finalize(self, layer: Any) -> None:
        pair = [self._take(matrix) for matrix in (layer.gate_up_proj, layer.down_proj)]
        if any(stored.order is not None for stored in pair):
            raise ConfigError(
                f"{layer.gate_up_proj.ctx_name}: experts quantized with act-order (desc_act) cannot be run; "
                "use a checkpoint without it"
            )
        self.gate_up, self.down = (stored.matrix for stored in pair)

    def apply(self, layer: Any, x: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None) -> Tensor:
        return self._run(x, self.gate_up, self.down, weights, slots, shared)


class QuantizedHead(QuantizedLinear):
    def logits(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        return self.apply(layer, hidden, torch.float32)

    def argmax(self, layer: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        value, index = self.logits(layer, hidden).max(dim=-1)
        return value, index

    def packed_bytes(self, layer: nn.Module) -> int:
        return 0
