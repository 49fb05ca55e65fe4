"""The gated activation of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.registry import op


@op()
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`. gate_up `[tokens, 2 * size]`, the gate half first; returns `[tokens, size]`. Source: Shazeer
    2020.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
