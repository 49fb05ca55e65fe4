"""The decoder layers of this pipeline stage, under their global numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

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
        """hidden `[tokens, hidden]` -> (hidden, residual) after the last layer; their sum is the residual stream.

        Of all tokens or, where the last layer leaves the others out, of those of `batch.logits_indices` alone.
        """
        residual: Tensor | None = None
        *layers, last = self
        for layer in layers:
            hidden, residual = layer(hidden, residual, batch)
        wanted = batch.logits_indices
        if wanted is not None and len(wanted) < batch.num_tokens:
            batch = replace(batch, kept=wanted)
        return last(hidden, residual, batch)
