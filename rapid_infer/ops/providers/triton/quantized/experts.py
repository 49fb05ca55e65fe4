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
from rapid_infer.ops.providers.triton.quantized.choice import (
    LINE,
    cannot_multiply,
    codes_of,
    inner_group,
    is_inner,
    most_lines,
)
from rapid_infer.ops.providers.triton.quantized.dequantize import constants_of, dequantize, tensors_of
from rapid_infer.ops.providers.triton.quantized.kernels import line_places, row_products
from rapid_infer.ops.quantized import QuantizedMatrix

TILES_SHARING = 8


@dataclass(frozen=True)
class Tile:
    """Rows of the matrix in a program, lines of 64 bytes of each at a time, and the stages of its loop."""

    block_n: int
    lines: int
    stages: int


TILES = {16: Tile(64, 2, 4), 32: Tile(64, 2, 4), 64: Tile(64, 2, 3)}
"""By choices of a tile; with more for each expert arithmetic takes the time, and matrices are written out."""


@triton.jit(do_not_specialize=["tiles", "iters"])
def experts_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, row_ptr, out_ptr, slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr,
    x_stride, tiles, size, N, K, width, groups, iters,
    TOP_K: tl.constexpr, GATED: tl.constexpr, ALONE: tl.constexpr, GROUPED: tl.constexpr,
    FORM: tl.constexpr, GROUP_N: tl.constexpr, GROUP: tl.constexpr, INNER: tl.constexpr, ZERO: tl.constexpr,
    ROW_SCALE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A matrix `[N, K]` of each tile's expert. GATED: `out[place] = silu(gate x) * (up x)` of a choice's token, with
    `size` of N / 2; else `out[choice] = down x[place]`, with `size` of N. Places are sorted, see `ExpertsPlan`.
    """
    start_next(PDL)
    WARPS: tl.constexpr = BLOCK_N // 16
    OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile, block = position(tl.program_id(0), tiles, tl.cdiv(size, OUT), GROUPED)
    wait_previous(PDL)
    expert, place, inside, choice = choices_of(slots_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, tile, M, ALONE)
    if expert < 0:
        return
    line_place, line = line_places(BLOCK_N, LINES, WARPS)
    output = tl.arange(0, BLOCK_N)
    line_row = tl.minimum(block * OUT + line_place % OUT, size - 1) + line_place // OUT * size
    row = tl.minimum(block * OUT + output % OUT, size - 1) + output // OUT * size
    source = choice // TOP_K if GATED else place
    expert = expert.to(tl.int64)
    scales = expert * ((N + GROUP_N - 1) // GROUP_N) * groups
    acc = row_products(
        x_ptr + source.to(tl.int64)[:, None] * x_stride, inside[:, None], word_ptr + expert * N * width,
        scale_ptr + scales, zero_ptr + scales, line_row.to(tl.int64), row.to(tl.int64), row_ptr + expert * N + row,
        line, 0, K, width, groups, iters, FORM, GROUP, INNER, ZERO, ROW_SCALE, M, BLOCK_N, LINES, WARPS, STAGES,
        False, EVEN, WIDE, x_ptr.dtype.element_ty, GROUP_N, False, False,
    )  # fmt: skip
    column = block * OUT + tl.arange(0, OUT)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, OUT, M]), (1, 2, 0)))
        write(tl.trans(gate * tl.sigmoid(gate) * up), out_ptr, place, size, column, inside)
    else:
        write(tl.trans(acc), out_ptr, choice, size, column, inside)


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
    group, tile = inner_group(matrix), TILES[settings["M"]]
    lines = min(most_lines(matrix.form, group), tile.lines)
    words, scale, zero, row_scale = tensors_of(matrix)
    width = words.shape[-1]
    iters = triton.cdiv(width, 16 * lines)
    experts_kernel[(tiles * triton.cdiv(size, tile.block_n // (1 + gated)),)](
        x, words, scale, zero, row_scale, out, slots, *tables,
        x.stride(0), tiles, size, n, k, width, matrix.scale.shape[-1], iters,
        GATED=gated,
        GROUPED=TILES_SHARING,
        **constants_of(matrix),
        INNER=is_inner(matrix.form, group),
        BLOCK_N=tile.block_n,
        LINES=lines,
        STAGES=tile.stages,
        EVEN=iters * lines * LINE * codes_of(matrix.form) == k,
        WIDE=INTERPRETED,
        num_warps=tile.block_n // 16,
        **settings,
        **options(x),
    )  # fmt: skip
