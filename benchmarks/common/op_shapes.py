"""A model's sizes, and what one benchmark case of an operator is."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import workloads
from rapid_infer.ops import OPS


@dataclass(frozen=True)
class Shape:
    """What decides the sizes: a model's widths, the dtype, and where the tensors lie. `quick`: few and small cases.

    `raw`: the model's config, for sizes that not every model has.
    """

    model: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype
    device: str
    quick: bool
    raw: dict[str, Any]

    @classmethod
    def of(cls, model: str, dtype: torch.dtype, device: str, quick: bool) -> Shape:
        """Of a model named in data/workloads.json, or of a directory with a config.json. ValueError for neither."""
        raw = workloads.spec()["models"].get(model)
        if raw is None:
            path = Path(model) / "config.json"
            if not path.is_file():
                raise ValueError(f"--model {model}: neither a directory with config.json nor one of "
                                 f"{', '.join(workloads.model_names())}")  # fmt: skip
            raw = json.loads(path.read_text(encoding="utf-8"))
        heads = raw["num_attention_heads"]
        return cls(
            Path(model).name,
            raw["hidden_size"],
            raw["intermediate_size"],
            heads,
            raw.get("num_key_value_heads", heads),
            raw.get("head_dim") or raw["hidden_size"] // heads,
            raw["vocab_size"],
            dtype,
            device,
            quick,
            raw,
        )

    def rand(self, *size: int) -> Tensor:
        return torch.randn(*size, dtype=self.dtype, device=self.device)

    def weight(self, rows: int, columns: int) -> Tensor:
        """Such that products keep the size of their inputs."""
        return self.rand(rows, columns).div_(columns**0.5)

    def pick(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes[:2] if self.quick else sizes


@dataclass(frozen=True)
class OpCase:
    """One input. `make` builds the keyword arguments.

    bytes   that must be moved: every input once, every output once
    flops   that must be done; 0 where they do not matter
    cold    arguments that a model reads from memory at every call, such as weights: each call gets other copies
    reused  arguments whose buffers a provider may write: they are restored before each call, at no cost in the figures
    extra   what a layer would bind with
    """

    op: str
    label: str
    make: Callable[[], dict[str, Any]]
    bytes: int
    flops: int = 0
    cold: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    reused: tuple[str, ...] = ()


Builder = Callable[[Shape], Iterator[OpCase]]
BUILDERS: dict[str, Builder] = {}


def builds(*ops: str) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(ops, builder))
        return builder

    return add


def cases(op: str, shape: Shape) -> list[OpCase]:
    """The op's cases. LookupError, with the reason, when there is no builder for it or for its arguments."""
    if op not in BUILDERS:
        raise LookupError("no case builder in benchmarks/common/op_cases.py")
    return [case for case in BUILDERS[op](shape) if case.op == op]


def fit(op: str, known: dict[str, Any]) -> dict[str, Any]:
    """Those of `known` that the op takes. LookupError for an argument that is not known."""
    names = list(inspect.signature(OPS[op].reference).parameters)
    if unknown := [name for name in names if name not in known]:
        raise LookupError(f"the case builder does not know its arguments {', '.join(unknown)}")
    return {name: known[name] for name in names}


def values(*counts: int, size: int = 2) -> int:
    """Bytes of so many values of `size` bytes."""
    return sum(counts) * size
