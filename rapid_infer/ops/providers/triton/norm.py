"""RMSNorm, alone and after a residual addition: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous


@triton.jit
def weigh(x, scale, weight, dtype: tl.constexpr):
    """`x * scale * weight`, rounded to `dtype` before the weight is applied and after it, as in the reference."""
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, stride, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_previous(PDL)
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * size + column, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / size + eps)
    tl.store(out_ptr + row * size + column, weigh(x, scale, weight, out_ptr.dtype.element_ty), mask=inside)


def block_and_warps(size: int) -> tuple[int, int]:
    """Of a program that has a row: they decide in which order the squares are added."""
    block = triton.next_power_of_2(size)
    return block, min(max(block // 512, 1), 16)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    size = x.shape[-1]
    block, warps = block_and_warps(size)
    rows = x.numel() // size
    if rows:
        _norm_kernel[(rows,)](
            x, residual, weight, out, x.stride(-2) if x.dim() > 1 else size, size, eps,
            ADD=residual is not None, BLOCK=block, num_warps=warps, **options(x),
        )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x if x.dim() <= 2 and x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds in place to `residual`, which must be contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, out)
    return out, residual
