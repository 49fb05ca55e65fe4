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
from rapid_infer.parallel.partial_sum import PartialSum, reduced


class LayerStack(nn.Module):
    """Runs layers in order. Each takes (hidden, residual, batch) and returns (hidden, residual), both
    `[tokens, hidden]`; see `RMSNorm.add`.

    `layers` are those of this stage, by their numbers among the model's `total`; the others are `Elsewhere`. The
    model's last layer alone, if its `drops_tokens` says that it can, may go on with those tokens that are asked for.
    """

    def __init__(self, layers: Mapping[int, nn.Module], total: int) -> None:
        super().__init__()
        for number in range(total):
            self.add_module(str(number), layers[number] if number in layers else Elsewhere())
        self._here = [str(number) for number in sorted(layers)]
        self._only_distinct = False

    def __iter__(self) -> Iterator[nn.Module]:
        return map(self.get_submodule, self._here)

    def __len__(self) -> int:
        return len(self._here)

    @cached_property
    def _distinct(self) -> set[str]:
        """Names of one layer of each kind, and of the last."""
        *layers, last = self._here
        return {*{_kind(self.get_submodule(name)): name for name in layers}.values(), last}

    def forward(
        self, hidden: Tensor, batch: ForwardBatch, residual: Tensor | None = None
    ) -> tuple[Tensor | PartialSum, Tensor | None]:
        """hidden and residual `[tokens, hidden]` -> the same after the last layer; their sum is the residual stream.

        Of all tokens or, where the last layer leaves the others out, of those of `batch.logits_indices` alone.
        """
        aux = {str(number) for number in batch.aux_layers}
        last = next(reversed(self._modules))
        for name in self._here:
            if self._only_distinct and name not in self._distinct and name not in aux:
                continue
            layer: Any = self._modules[name]
            if name == last and name not in aux:
                batch = self._last_layer_batch(batch, layer)
            hidden, residual = layer(hidden, residual, batch)
            if name in aux:
                batch.aux_hidden_states[int(name)] = reduced(hidden) if residual is None else reduced(hidden) + residual
        return hidden, residual

    @staticmethod
    def _last_layer_batch(batch: ForwardBatch, last: nn.Module) -> ForwardBatch:
        """For the last layer: the batch with which it leaves out the tokens that nobody asks for, if it may."""
        wanted = batch.logits_indices
        if wanted is None or len(wanted) >= batch.num_tokens or not getattr(last, "drops_tokens", False):
            return batch
        return replace(batch, last_layer_indices=wanted)


@contextmanager
def distinct_layers(model: nn.Module) -> Iterator[bool]:
    """Inside, the model's stacks run one layer of each kind and the last one. Gives whether that leaves out any.

    That launches every kernel that all layers launch, in less time: for runs whose results nobody reads.
    """
    stacks = [module for module in model.modules() if isinstance(module, LayerStack)]
    for stack in stacks:
        stack._only_distinct = True
    try:
        yield any(len(stack._distinct) < len(stack) for stack in stacks)
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
