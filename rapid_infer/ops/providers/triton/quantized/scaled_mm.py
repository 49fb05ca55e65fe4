"""Products of quantized activations and an FP8 matrix by cuBLAS, where torch and the device have them.

Of scales for each row of the product (those of tokens and of outputs) and of those for 1 x 128 and 128 x 128. Sums are
promoted to fp32 on the way (no fast accumulation), as Hopper's own accumulator keeps about 14 bits.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.quantized import QuantizedMatrix, expand

BLOCK = 128
ROWS_ALIGNED = 16
"""cuBLAS takes multiples of 4, and is faster at multiples of this."""


def by_row(matrix: QuantizedMatrix, group: int) -> bool:
    """Whether scales can be applied to the sums of all inputs."""
    return matrix.scale.shape[-1] == 1 and group == matrix.shape[1]


def by_block(matrix: QuantizedMatrix, group: int) -> bool:
    n, k = matrix.shape
    return matrix.group == (BLOCK, BLOCK) and group == BLOCK and not n % BLOCK and not k % BLOCK


def scaled_kind(matrix: QuantizedMatrix, group: int, device: torch.device) -> str | None:
    """Which of cuBLAS' products takes these scales; None: none."""
    n, k = matrix.shape
    if device.type != "cuda" or n % 16 or k % 16 or not matrix.values.is_contiguous():
        return None
    kind = "row" if by_row(matrix, group) else "block" if by_block(matrix, group) else None
    return kind if kind is not None and works(kind, device) is None else None


@cache
def works(kind: str, device: torch.device) -> str | None:
    """Why this device cannot multiply with such scales; None: it can, as a small product showed."""
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm"
    size = 512
    ones = torch.ones(size, size, device=device).to(torch.float8_e4m3fn)
    # Two columns of blocks unlike the others: scales that are read in another order show.
    scales = torch.ones(size // BLOCK, size // BLOCK, device=device)
    scales[:, 1], scales[1, :] = 2.0, 4.0
    matrix = QuantizedMatrix("fp8", ones, scales, (size, size), (BLOCK, BLOCK))
    tokens = torch.arange(1.0, 1 + size // BLOCK, device=device).expand(size, -1)
    if kind == "row":
        row = torch.arange(1.0, 1 + size, device=device).unsqueeze(1)
        matrix = QuantizedMatrix("fp8", ones, row, (size, size), (1, size))
        tokens = row
    group = size // tokens.shape[1]
    try:
        got = scaled_product(kind, ones, tokens.t().contiguous().t(), matrix, torch.float32)
    except (RuntimeError, ValueError) as error:
        return f"scaled_mm by {kind}: {str(error).splitlines()[0]}"
    want = (ones.float() * expand(tokens, (size, size), (1, group))) @ (
        ones.float() * expand(matrix.scale, (size, size), matrix.group)
    ).t()
    return None if torch.allclose(got.float(), want, rtol=1e-2) else f"scaled_mm by {kind} gives wrong results"


def scaled_product(kind: str, codes: Tensor, scale: Tensor, matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """`(codes * scale) W^T`; see `scaled_kind`. Scales by group lie in memory group after group."""
    weight = matrix.values.t()
    # Its sums are fp32 in any case; no product by rows writes them as such.
    written = torch.bfloat16 if dtype is torch.float32 else dtype
    kinds = F.ScalingType
    if kind == "row":
        rows = (
            matrix.scale if matrix.group[0] == 1 else expand(matrix.scale, (matrix.shape[0], 1), (matrix.group[0], 1))
        )
        out = F.scaled_mm(
            codes, weight, scale, kinds.RowWise, rows.view(1, -1), kinds.RowWise, output_dtype=written,
        )  # fmt: skip
    else:
        # Rows of the scales must be multiples of four.
        blocks = F.pad(matrix.scale, (0, -matrix.scale.shape[1] % 4))
        out = F.scaled_mm(
            codes, weight, scale, kinds.BlockWise1x128, blocks.t(), kinds.BlockWise128x128, output_dtype=written,
        )  # fmt: skip
    return out.to(dtype)
