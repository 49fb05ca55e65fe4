"""What a checkpoint holds of each module of a model, by the names it has there, read from headers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

PLAIN_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
KV_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale"})


class TensorHeader(Protocol):
    """Name, shape and type of a tensor in a file."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class StoredPart:
    """A module of the checkpoint, `model.layers.0.self_attn.q_proj` say, and its tensors by leaf name.

    `tensors` is None where there are no files (load_format="dummy"): then the configuration alone decides.
    """

    name: str
    tensors: Mapping[str, TensorHeader] | None = field(default=None, hash=False)

    @property
    def quantized(self) -> bool:
        """Whether the leaves are those of a quantized matrix."""
        leaves = {leaf: info for leaf, info in (self.tensors or {}).items() if leaf not in KV_SCALES}
        weight = leaves.get("weight")
        return bool(leaves.keys() - {"weight", "bias"}) or (weight is not None and weight.dtype not in PLAIN_DTYPES)

    def leaf(self, *names: str) -> str:
        """The first of `names` that is stored; without files, the first."""
        return next((name for name in names if name in (self.tensors or ())), names[0])

    def dtype(self, leaf: str, default: torch.dtype) -> torch.dtype:
        """Type of the leaf as stored; `default` where it is not."""
        info = (self.tensors or {}).get(leaf)
        return default if info is None else info.dtype

    def shape(self, leaf: str) -> tuple[int, ...] | None:
        """Shape of the leaf as stored; None where it is not."""
        info = (self.tensors or {}).get(leaf)
        return None if info is None else tuple(info.shape)


@dataclass(frozen=True)
class StoredModules:
    """`parts`: by module of the model, what the checkpoint has for it. `sources`, where there are no files: the names
    that a checkpoint would have for a module.
    """

    parts: Mapping[str, tuple[StoredPart, ...]] = field(default_factory=dict)
    sources: Callable[[str], tuple[str, ...]] | None = None

    def of(self, *modules: str) -> tuple[StoredPart, ...]:
        """Everything that fills these modules; empty where the checkpoint has nothing for them."""
        if self.sources is not None:
            return tuple(StoredPart(name) for module in modules for name in self.sources(module))
        return tuple(part for module in modules for part in self.parts.get(module, ()))
