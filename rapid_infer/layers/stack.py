"""The decoder layers of this pipeline stage, under their global numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.parameter import Elsewhere


class LayerStack(nn.Module):
    """Runs layers in order. Each takes and returns (hidden, residual), both `[tokens, hidden]`; see `RMSNorm.add`.

    `layers` are those of this stage, by their numbers among the model's `total`; the others are `Elsewhere`.
    """

    def __init__(self, layers: Mapping[int, nn.Module], total: int) -> None:
        super().__init__()
        for number in range(total):
            self.add_module(str(number), layers[number] if number in layers else Elsewhere())
        self._only_distinct = False

    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for layer in self._modules.values() if not isinstance(layer, Elsewhere))  # type: ignore[misc]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @cached_property
    def _distinct(self) -> list[nn.Module]:
        """One layer of each kind, and the last."""
        *layers, last = self
        return [*{_kind(layer): layer for layer in layers}.values(), last]

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """hidden `[tokens, hidden]` -> (hidden, residual) after the last layer; their sum is the residual stream.

        Of all tokens or, where the last layer leaves the others out, of those of `batch.logits_indices` alone.
        """
        residual: Tensor | None = None
        *layers, last = self._distinct if self._only_distinct else self
        for layer in layers:
            hidden, residual = layer(hidden, residual, batch)
        wanted = batch.logits_indices
        if wanted is not None and len(wanted) < batch.num_tokens:
            batch = replace(batch, kept=wanted)
        return last(hidden, residual, batch)


@contextmanager
def distinct_layers(model: nn.Module) -> Iterator[None]:
    """Inside, the model's stacks run one layer of each kind and the last one.

    That launches every kernel that all layers launch, in less time: for runs whose results nobody reads.
    """
    stacks = [module for module in model.modules() if isinstance(module, LayerStack)]
    for stack in stacks:
        stack._only_distinct = True
    try:
        yield
    finally:
        for stack in stacks:
            stack._only_distinct = False


def _kind(layer: nn.Module) -> Any:
    """What a layer's launches can depend on: its modules, their settings and the shapes of their parameters."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, repr(value)) for key, value in sorted(vars(module).items()) if _is_setting(key, value)),
            tuple((key, p.shape, p.stride(), p.dtype) for key, p in module._parameters.items() if p is not None),
        )
        for name, module in layer.named_modules()
    )


def _is_setting(key: str, value: Any) -> bool:
    if key == "ctx_name":
        return False
    return isinstance(value, (bool, int, float, str, tuple, type(None))) or is_dataclass(value)
