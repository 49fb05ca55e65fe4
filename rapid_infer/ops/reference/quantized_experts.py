"""The experts of a mixture-of-experts layer with quantized matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops.quantized import QuantizedMatrix
from rapid_infer.ops.reference.dequantize import dequantize
from rapid_infer.ops.reference.fused_experts import fused_experts
from rapid_infer.ops.registry import op


@op(info=("form", "experts", "hidden_size", "intermediate_size"), capturable=False)
def quantized_experts(
    x: Tensor, gate_up: QuantizedMatrix, down: QuantizedMatrix, weights: Tensor, slots: Tensor, shared: Tensor | None
) -> Tensor:
    """As fused_experts, of which all other arguments are; activations are not quantized.

    gate_up, down  stacks of experts, of shape `(2 * size, hidden)` and `(hidden, size)`, of one form
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if shared is None else shared.float()
    for expert in slots[slots >= 0].unique().tolist():
        # One expert's matrices at a time: all at once would be the unquantized model.
        pair = (dequantize.reference(m.expert(expert), torch.float32).unsqueeze(0) for m in (gate_up, down))
        mine = torch.where(slots == expert, 0, -1)
        total = fused_experts.reference(x.float(), *pair, weights, mine, total)
    return total.to(x.dtype)
