"""SiLU-and-mul: one program per row and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_previous(PDL)
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + size + column, mask=inside, other=0.0)
    # Rounded before the product, as in the reference.
    activated = (gate * tl.sigmoid(gate)).to(up.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * size + column, product.to(up.dtype), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    x = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(size), 1024)
    if rows:
        grid = (rows, triton.cdiv(size, block))
        _silu_and_mul_kernel[grid](x, out, x.stride(0), size, BLOCK=block, num_warps=4, **options(x))
    return out
