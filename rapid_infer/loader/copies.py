"""One copy of a load plan: from a slice of a stored tensor to a region of a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rapid_infer.layers.parameter import Placement
from rapid_infer.loader.headers import TensorInfo
from rapid_infer.loader.index_map import Fetch, IndexMap, Shape, Slices, full_slices, sliced_shape


@dataclass(frozen=True)
class Copy:
    """A slice of tensor `info`, laid out by `index`, into the region that `placement` names."""

    info: TensorInfo
    placement: Placement
    index: IndexMap | None = None

    @property
    def shape(self) -> Shape:
        """Shape of the whole piece, of which a rank takes its share."""
        return self.index.shape(self.info.shape) if self.index else self.info.shape

    def read(self, fetch: Fetch) -> tuple[torch.Tensor, int]:
        """The values to write, in the checkpoint's type, and the bytes fetched for them.

        `fetch(slices)` reads a slice of the stored tensor.
        """
        fetched: list[int] = []

        def count(cut: Slices) -> torch.Tensor:
            values = fetch(cut)
            fetched.append(values.nbytes)
            return values

        # A single value fits whatever its shape is called: [] or [1].
        values = self.cut(count, self.placement.source if self.shape == self.placement.shape else ())
        return values, sum(fetched)

    def cut(self, fetch: Fetch, source: Slices) -> torch.Tensor:
        """`source` of the whole piece."""
        source = full_slices(source, self.shape)
        return self.index.read(fetch, self.info.shape, source) if self.index else fetch(source)

    def nbytes(self) -> int:
        """Bytes that `read` fetches from the file."""
        if self.index is None and self.info.shape == self.placement.shape:
            return math.prod(sliced_shape(self.placement.source, self.info.shape)) * self.info.dtype.itemsize
        stored = torch.empty(self.info.shape, dtype=self.info.dtype, device="meta")
        return self.read(lambda cut: stored[cut])[1]
