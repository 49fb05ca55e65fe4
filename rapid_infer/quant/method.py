"""The contract of a weight format, and the choice of one from a checkpoint's `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rapid_infer.errors import ConfigError
from rapid_infer.ops.registry import BoundOp
from rapid_infer.quant.param_spec import ParamSpec
from rapid_infer.registry import EntryPointTable


class OpContext(Protocol):
    """The part of a BuildContext that a method needs."""

    def op(self, name: str, **facts: Any) -> BoundOp: ...


class QuantMethod(Protocol):
    """How one linear layer stores and applies its weight.

    A method may also have `gated(ctx)`: see `PlainMethod`, whose products a gated layer can have fused.
    """

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        """The parameters by leaf name ("weight", "weight_scale_inv", ...); `dtype` is that of activations."""
        ...

    def bind(self, layer: nn.Module, ctx: OpContext) -> None:
        """Choose the operators this layer will call; the parameters exist, still without values.

        `layer.layout` (`MatrixLayout`) says how they lie over the layer's parts and what of them this rank has.
        """
        ...

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """`x [tokens, in] -> [tokens, out]`, without bias."""
        ...

    def finalize(self, layer: nn.Module) -> None:
        """Repack once all weights are in place."""
        ...


class QuantScheme(Protocol):
    """A checkpoint's whole scheme: which method each module uses."""

    name: str

    def method(self, module: str) -> QuantMethod:
        """The method for the linear layer with this dotted name."""
        ...


def select_scheme(quantization_config: Mapping[str, Any] | None) -> QuantScheme:
    """The scheme for a checkpoint. ConfigError, naming method and supported ones, when none is installed for it.

    Schemes are classes with `from_config(dict)`, found under the entry-point group `rapid_infer.quantization` by
    `quant_method`.
    """
    from rapid_infer.quant.plain import PlainScheme

    if not quantization_config:
        return PlainScheme()
    table = EntryPointTable("rapid_infer.quantization")
    method = quantization_config.get("quant_method") or quantization_config.get("quant_algo")
    if method not in table.names():
        supported = ", ".join(["none (bfloat16, float16, float32)", *table.names()])
        raise ConfigError(
            f"config.json says the weights are quantized with quant_method={method!r}, which nothing installed "
            f"supports (supported: {supported}); use an unquantized checkpoint or "
            f"install a package for {method!r}"
        )
    scheme: Any = table.load(table.lookup(method))
    return scheme.from_config(quantization_config)
