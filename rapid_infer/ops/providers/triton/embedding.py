"""Embedding lookup: one program per token and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

BLOCK = 1024


@triton.jit
def _embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, stride, size, first, rows,
    BLOCK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_previous(PDL)
    row = tl.load(ids_ptr + token)
    exists = column < size
    if PART:
        row -= first
        exists = exists & (row >= 0) & (row < rows)
    values = tl.load(weight_ptr + row * stride + column, mask=exists, other=0.0)
    tl.store(out_ptr + token * size + column, values, mask=column < size)


def embedding(input_ids: Tensor, weight: Tensor, start: int | None = None) -> Tensor:
    tokens, size = len(input_ids), weight.shape[1]
    out = torch.empty(tokens, size, dtype=weight.dtype, device=weight.device)
    if tokens:
        grid = (tokens, triton.cdiv(size, BLOCK))
        _embedding_kernel[grid](
            input_ids, weight, out, weight.stride(0), size, start or 0, len(weight),
            BLOCK=BLOCK, PART=start is not None, **options(weight),
        )  # fmt: skip
    return out
