"""RMSNorm and the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rapid_infer.errors import PluginError
from rapid_infer.layers.context import BuildContext
from rapid_infer.parallel.partial_sum import PartialSum, reduced


class RMSNorm(nn.Module):
    """weight `[size]`, whole on every rank."""

    def __init__(self, ctx: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=ctx.dtype), requires_grad=False)
        self.eps = eps
        self._norm = ctx.op("rms_norm")
        self._add_norm = ctx.op("fused_add_rms_norm")

    def forward(self, x: Tensor | PartialSum) -> Tensor:
        """`[tokens, size]` -> the same, normed."""
        return self._norm(reduced(x), self.weight, self.eps)

    def add(self, x: Tensor | PartialSum, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and norm the sum: (normed, new residual). residual None: the stream starts with
        x. PluginError when the two hold different tokens.
        """
        if residual is None:
            x = reduced(x)
            return self._norm(x, self.weight, self.eps), x
        if x.shape != residual.shape:
            # One row against several would be spread over them.
            raise PluginError(
                f"a norm got {list(x.shape)} to add to a residual stream of {list(residual.shape)}; both must hold the "
                "same tokens: in a layer with a forward of its own, batch.match_tokens(residual, x) takes those of x"
            )
        if isinstance(x, PartialSum):
            if self._add_norm.provider == "triton" and (fused := x.add_rms_norm(residual, self.weight, self.eps)):
                return fused
            x = x.reduce()
        return self._add_norm(x, residual, self.weight, self.eps)
