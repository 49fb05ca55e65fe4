"""The decoder layers of this pipeline stage, under their global numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from rapid_infer.layers.batch import ForwardBatch


class LayerStack(nn.Module):
    """Runs layers in order. Each takes and returns (hidden, residual), both `[tokens, hidden]`; see `RMSNorm.add`."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """hidden `[tokens, hidden]` -> (hidden, residual) after the last layer; their sum is the residual stream."""
        residual: Tensor | None = None
        for layer in self._modules.values():
            assert layer is not None
            hidden, residual = layer(hidden, residual, batch)
        return hidden, residual
