"""Activations to e4m3 with scales made on the way; see `reference.quantized_linear.quantize_activations`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.quantized.decode import fp8_codes, quotients
from rapid_infer.ops.quantized import expand

AT_ONCE = 4096
"""Inputs of a program, where a scale does not need more."""


@triton.jit
def _quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, given_ptr, K, x_stride, scale_row, scale_group,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, GIVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, GROUP_PAD)
    column = group[:, None] * GROUP + within[None, :]
    real = (within < GROUP)[None, :] & (column < K)
    wait_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=real, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(given_ptr)
    else:
        # As integers, among which NaN comes after infinity: a maximum may pass over it. Infinity fails the row as well,
        # whatever its codes are.
        bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        largest = tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(largest == 0, 1.0, tl.div_rn(largest, largest * 0 + 448.0))
    ratio = quotients(x, tl.broadcast_to(scale[:, None], [GROUPS, GROUP_PAD]))
    codes = fp8_codes(tl.minimum(tl.maximum(ratio, -448.0), 448.0))
    if GIVEN:
        codes = tl.where((x != x) | (tl.abs(x) == float("inf")), 0x7F, codes)
    tl.store(codes_ptr + row * K + column, codes, mask=real)
    tl.store(scale_ptr + row * scale_row + group * scale_group, scale, mask=group * GROUP < K)


def quantize_activations(
    x: Tensor, group: int, scale: Tensor | None, rows: int | None = None, by_group: bool = False
) -> tuple[Tensor, Tensor]:
    """(codes `[rows, k]`, scale `[rows, ceil(k / group)]`), both without values behind x's rows.

    `by_group`: scales lie in memory group after group.
    """
    tokens, k = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, groups = rows or tokens, triton.cdiv(k, group)
    codes = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    made = torch.empty(groups, rows, dtype=torch.float32, device=x.device).t()
    if not by_group:
        made = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(group)
    at_once = max(min(AT_ONCE // padded, triton.next_power_of_2(groups)), 1)
    if tokens:
        _quantize_kernel[(tokens, triton.cdiv(groups, at_once))](
            x, codes.view(torch.uint8), made, made if scale is None else scale, k, x.stride(0), *made.stride(),
            GROUPS=at_once, GROUP=group, GROUP_PAD=padded, GIVEN=scale is not None,
            num_warps=8 if at_once * padded > 2048 else 4, **options(x),
        )  # fmt: skip
    return codes, made


def dequantize_activations(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """What they stand for, rounded to `dtype`."""
    return (codes.float() * expand(scale, (codes.shape[0], codes.shape[1]), (1, group))).to(dtype)
