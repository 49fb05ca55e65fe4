"""The gated activation of a SwiGLU feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, size in ((1, 64), (7, 1536), (33, 48)):
        yield Case({"gate_up": torch.randn(rows, 2 * size, device=device).to(dtype)})


@op(inputs=_inputs)
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`. gate_up `[tokens, 2 * size]`, the gate half first; returns `[tokens, size]`. Source: Shazeer
    2020.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
