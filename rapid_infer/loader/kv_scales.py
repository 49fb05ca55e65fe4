"""Scales of a quantized KV cache. Files name them in several ways, and none after the module that has the cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from rapid_infer.layers.attention import Attention
from rapid_infer.layers.parameter import Placement
from rapid_infer.loader.headers import TensorInfo
from rapid_infer.quant.checks import positive

KEY, VALUE = (0,), (1,)
SIDES = {
    "k_scale": KEY, "k_proj.output_scale": KEY,
    "v_scale": VALUE, "v_proj.output_scale": VALUE,
    "kv_scale": KEY + VALUE,
}  # fmt: skip
"""By the last components of a name, behind a leaf of `quant.stored.KV_SCALES`; other such tensors have no use."""


class KVScales:
    """Finds the attention that a scale belongs to, and notes which ones have been found."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.layers = {
            name: module
            for name, module in modules.items()
            if isinstance(module, Attention) and module.kv_scales is not None
        }
        self.filled: dict[tuple[str, int], str] = {}

    def without(self) -> list[str]:
        """Names of layers of which a scale of keys or of values was not found."""
        return [name for name in self.layers if not {(name, 0), (name, 1)} <= self.filled.keys()]

    def find(self, info: TensorInfo, path: str) -> list[Placement]:
        """Where the tensor goes, which is named as one of the module `path`, or of one beside the attention.

        Empty when it is no such scale. ValueError when it does not fit or another one was there before.
        """
        *_, owner, leaf = ["", *info.name.split(".")]
        sides = SIDES.get(leaf) or SIDES.get(f"{owner}.{leaf}") or ()
        near = next(filter(None, (self._below(p) for p in (path, path.rpartition(".")[0]))), [])
        if not sides or len(near) != 1:
            return []
        (name,) = near
        placements = []
        for side in sides:
            if (rival := self.filled.setdefault((name, side), info.name)) != info.name:
                raise ValueError(f"{rival} says already what the {'values' if side else 'keys'} of {name} have")
            placements.append(self._placement(self.layers[name], side, info.shape))
        return placements

    def _below(self, path: str) -> list[str]:
        return [name for name in self.layers if f"{name}.".startswith(f"{path}.")]

    @staticmethod
    def _placement(layer: Attention, side: int, shape: tuple[int, ...]) -> Placement:
        count, tp, local = torch.Size(shape).numel(), layer.parallel, layer.num_kv_heads
        if count != 1 and (count != shape[0] or max(count // tp.tp_size, 1) != local):
            raise ValueError(f"checkpoint {list(shape)}, expected one scale, or one for each of the model's KV heads")
        # As heads are cut, and repeated where there are more ranks.
        first = tp.tp_rank * count // tp.tp_size if count > 1 else 0
        assert layer.kv_scales is not None
        row = nn.Parameter(layer.kv_scales[side], requires_grad=False)
        return Placement(row, shape, check=positive, store=partial(_store, row.data, first))


def _store(row: Tensor, first: int, values: Tensor) -> None:
    row.copy_(values.float().flatten()[first : first + len(row)])
