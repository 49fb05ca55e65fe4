"""The contract of a weight format, and of a scheme, which says what format each module has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rapid_infer.ops.registry import BoundOp
from rapid_infer.quant.param_spec import ParamSpec


class OpContext(Protocol):
    """The part of a BuildContext that a method needs."""

    def op(self, name: str, **info: Any) -> BoundOp: ...


class WeightFormat(Protocol):
    """How a layer stores its weights; the layer lays them out, cuts them over ranks and has them loaded."""

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        """The parameters of a matrix by leaf name ("weight", "weight_scale_inv", ...); `dtype` is that of activations.

        Experts have them in `gate_up_proj` and in `down_proj`, with a dimension of experts before the others.
        """
        ...

    def bind(self, layer: nn.Module, ctx: OpContext) -> None:
        """Choose the operators this layer will call; the parameters exist, still without values.

        `layer.layout` (`MatrixLayout`) says how they lie over the layer's parts and what of them this rank has.
        """
        ...

    def finalize(self, layer: nn.Module) -> None:
        """Repack once all weights are in place."""
        ...


class QuantMethod(WeightFormat, Protocol):
    """How one linear layer stores and applies its weight.

    A method may also have `gated(ctx)`: see `PlainMethod`, whose products a gated layer can have fused.
    """

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """`x [tokens, in] -> [tokens, out]`, without bias."""
        ...

    def dequantize(self, layer: nn.Module) -> Tensor:
        """The matrix `[out, in]` in the dtype of activations, once all weights are in place.

        For a layer that needs the matrix itself (the latent up-projection, which is absorbed): it calls neither `bind`
        nor `finalize` nor `apply`, and gives its parameters up afterwards.
        """
        ...


class ExpertsMethod(WeightFormat, Protocol):
    """How the routed experts of one layer are stored and applied; `layer` has `gate_up_proj` and `down_proj`."""

    def apply(self, layer: nn.Module, x: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None) -> Tensor:
        """As the op fused_experts."""
        ...


class HeadMethod(WeightFormat, Protocol):
    """How a language-model head is stored and applied."""

    def logits(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """`hidden [n, in]` -> scores fp32 `[n, this rank's vocabulary]`."""
        ...

    def argmax(self, layer: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(best score fp32 `[n]`, its row int64 `[n]`); the score is not finite where a row has NaN."""
        ...

    def packed_bytes(self, layer: nn.Module) -> int:
        """Bytes that `finalize` adds to those of the parameters."""
        ...


class QuantScheme(Protocol):
    """A checkpoint's whole scheme: how each module stores and applies its weights, by the module's dotted name.

    One that leaves experts or the head as they are derives from `PlainScheme`.
    """

    name: str

    def method(self, module: str) -> QuantMethod:
        """Of a linear layer, or the latent up-projection `kv_b_proj`."""
        ...

    def experts(self, module: str) -> ExpertsMethod:
        """Of the experts of a layer, "layers.3.mlp.experts"."""
        ...

    def head(self, module: str) -> HeadMethod:
        """Of a head that is not tied to the embedding."""
        ...
