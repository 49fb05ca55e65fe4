"""Experts with quantized matrices: few choices for each of them fused, many by writing the matrices out in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.experts.fused_experts import COMBINED, choices_per_tile
from rapid_infer.ops.providers.triton.experts.fused_experts import fused_experts as plain_experts
from rapid_infer.ops.providers.triton.experts.kernels import choices_of, combine_kernel, position, write
from rapid_infer.ops.providers.triton.experts.plan import experts_plan
from rapid_infer.ops.providers.triton.facts import INTERPRETED
from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.quantized.choice import block_limit, cannot_multiply, inner_group, is_inner
from rapid_infer.ops.providers.triton.quantized.dequantize import constants_of, dequantize, tensors_of
from rapid_infer.ops.providers.triton.quantized.kernels import row_products
from rapid_infer.ops.quantized import HALF, QuantizedMatrix

TILES_SHARING = 8


@dataclass(frozen=True)
class Tile:
    """Outputs of a program, the stages of its loop, and whether the matrix is the left operand."""

    block_n: int
    stages: int
    weight_first: bool = False


TILES = {16: Tile(32, 4), 32: Tile(64, 3), 64: Tile(64, 3, weight_first=True)}
"""By choices of a tile; with more for each expert arithmetic takes the time, and matrices are written out."""


@triton.jit
def _of_expert(
    x_row, used, values_ptr, scale_ptr, zero_ptr, row_ptr, expert, row, N, K, width, groups, iters,
    FORM: tl.constexpr, GROUP_N: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    STAGES: tl.constexpr, WEIGHT_FIRST: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """fp32 `[M, BLOCK_N]`: rows of x times rows `row` of the matrix `[N, K]` of an expert."""
    rows = expert.to(tl.int64) * N + row
    scales = expert.to(tl.int64) * ((N + GROUP_N - 1) // GROUP_N) + row // GROUP_N
    return row_products(
        x_row, used, values_ptr, scale_ptr + scales * groups, zero_ptr + scales * groups, row_ptr + rows, rows, 0,
        K, width, groups, iters, FORM, GROUP, INNER, ZERO, ROW_SCALE, M, BLOCK_N, BLOCK, COUNT, STAGES, WEIGHT_FIRST,
        EVEN, WIDE, DTYPE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "iters"])
def experts_kernel(
    x_ptr, values_ptr, scale_ptr, zero_ptr, row_ptr, out_ptr, slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr,
    x_stride, tiles, size, N, K, width, groups, iters,
    TOP_K: tl.constexpr, GATED: tl.constexpr, ALONE: tl.constexpr, GROUPED: tl.constexpr,
    FORM: tl.constexpr, GROUP_N: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    STAGES: tl.constexpr, WEIGHT_FIRST: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A matrix `[N, K]` of each tile's expert. GATED: `out[place] = silu(gate x) * (up x)` of a choice's token, with
    `size` of N / 2; else `out[choice] = down x[place]`, with `size` of N. Places are sorted, see `ExpertsPlan`.
    """
    start_next(PDL)
    tile, block = position(tl.program_id(0), tiles, tl.cdiv(size, BLOCK_N), GROUPED)
    wait_previous(PDL)
    expert, place, inside, choice = choices_of(slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tile, M, ALONE)
    if expert < 0:
        return
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(column, size - 1)
    source = choice // TOP_K if GATED else place
    x_row = x_ptr + source.to(tl.int64)[:, None] * x_stride
    used = inside[:, None]
    acc = _of_expert(
        x_row, used, values_ptr, scale_ptr, zero_ptr, row_ptr, expert, row, N, K, width, groups, iters,
        FORM, GROUP_N, GROUP, INNER, ZERO, ROW_SCALE, M, BLOCK_N, BLOCK, COUNT, STAGES, WEIGHT_FIRST, EVEN, WIDE,
        x_ptr.dtype.element_ty,
    )  # fmt: skip
    if GATED:
        up = _of_expert(
            x_row, used, values_ptr, scale_ptr, zero_ptr, row_ptr, expert, row + size, N, K, width, groups, iters,
            FORM, GROUP_N, GROUP, INNER, ZERO, ROW_SCALE, M, BLOCK_N, BLOCK, COUNT, STAGES, WEIGHT_FIRST, EVEN, WIDE,
            x_ptr.dtype.element_ty,
        )  # fmt: skip
        write(acc * tl.sigmoid(acc) * up, out_ptr, place, size, column, inside)
    else:
        write(acc, out_ptr, choice, size, column, inside)


def quantized_experts(
    x: Tensor, gate_up: QuantizedMatrix, down: QuantizedMatrix, weights: Tensor, slots: Tensor, shared: Tensor | None
) -> Tensor:
    """Reads no tensor on the host and adds without atomics, so it can be captured and gives the same bits each time."""
    tokens, top_k = slots.shape
    experts, (hidden, size) = len(down.values), down.shape
    choices = tokens * top_k
    alone = tokens == 1
    per_tile = 16 if alone else choices_per_tile(choices, experts)
    wide = any(cannot_multiply(matrix.expert(0), x.dtype, INTERPRETED) for matrix in (gate_up, down))
    if wide or per_tile not in TILES or not tokens:
        return plain_experts(x, dequantize(gate_up, x.dtype), dequantize(down, x.dtype), weights, slots, shared)
    x = x if x.stride(-1) == 1 else x.contiguous()
    if alone:
        tiles, tables = choices, (slots,) * 4
    else:
        plan = experts_plan(slots, experts, per_tile)
        tiles, tables = plan.tiles, (plan.order, plan.expert, plan.first, plan.last)
    inner = torch.empty(choices, size, dtype=x.dtype, device=x.device)
    values = torch.empty(choices, hidden, dtype=x.dtype, device=x.device)
    settings = {"TOP_K": top_k, "ALONE": alone, "M": per_tile}
    _launch(x, gate_up, inner, size, slots, tables, tiles, True, settings)
    _launch(inner, down, values, hidden, slots, tables, tiles, False, settings)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(hidden), COMBINED)
    combine_kernel[(tokens, triton.cdiv(hidden, block))](
        values, weights, slots, shared if shared is not None else x, out,
        shared.stride(0) if shared is not None else 0, hidden,
        TOP_K=top_k, BLOCK=block, SHARED=shared is not None, num_warps=4, **options(x),
    )  # fmt: skip
    return out


def _launch(
    x: Tensor, matrix: QuantizedMatrix, out: Tensor, size: int, slots: Tensor, tables: tuple[Tensor, ...], tiles: int,
    gated: bool, settings: dict[str, Any],
) -> None:  # fmt: skip
    n, k = matrix.shape
    width, group, rows = matrix.values.shape[-1], inner_group(matrix), settings["M"]
    inner, fp8 = is_inner(matrix.form, group), matrix.form == "fp8"
    block = min(block_limit(matrix.form, group), 128)
    tile = TILES[rows]
    iters = triton.cdiv(width, block)
    values, scale, zero, row_scale = tensors_of(matrix)
    experts_kernel[(tiles * triton.cdiv(size, tile.block_n),)](
        x, matrix.values if fp8 else values, scale, zero, row_scale, out, slots, *tables,
        x.stride(0), tiles, size, n, k, width, matrix.scale.shape[-1], iters,
        GATED=gated,
        GROUPED=TILES_SHARING,
        **constants_of(matrix),
        INNER=inner,
        BLOCK_N=tile.block_n,
        BLOCK=block,
        COUNT=block // group if inner and 0 < group < HALF else 1,
        STAGES=tile.stages,
        WEIGHT_FIRST=tile.weight_first,
        EVEN=iters * block * (1 if fp8 else 2) == k,
        WIDE=INTERPRETED,
        num_warps=4,
        **settings,
        **options(x),
    )  # fmt: skip
