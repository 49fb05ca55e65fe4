"""The experts of a layer in four kernels: sort, gate and up with SiLU-and-mul, down, and the weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rapid_infer.ops.providers.triton.experts.kernels import combine_kernel, down_kernel, gate_up_kernel
from rapid_infer.ops.providers.triton.experts.plan import experts_plan
from rapid_infer.ops.providers.triton.experts.tma import down_tma_kernel, gate_up_tma_kernel
from rapid_infer.ops.providers.triton.launch import has_tma, num_multiprocessors, options

TILES_SHARING = 8
"""Tiles of one expert that read a block of its weight one after another."""
COMBINED = 1024


@dataclass(frozen=True)
class Tile:
    """Outputs of a program, and the inputs it takes at a time; `up` for gate and up, `down` for down.

    tma: TMA copies tiles of weights where it can, for a program on each multiprocessor.
    """

    up: tuple[int, int]
    down: tuple[int, int]
    warps: int
    stages: int
    tma: bool = False


# By choices of a tile. Few choices: bound by memory, many small programs; many: by arithmetic.
TILES = {
    16: Tile(up=(32, 128), down=(32, 128), warps=4, stages=4),
    32: Tile(up=(64, 64), down=(64, 128), warps=4, stages=4),
    64: Tile(up=(64, 64), down=(128, 64), warps=4, stages=4),
    128: Tile(up=(128, 64), down=(256, 64), warps=8, stages=4, tma=True),
}
ALONE = Tile(up=(64, 128), down=(32, 256), warps=4, stages=4)
"""A single token's choices, each with a tile of 16 to itself. All as `benchmarks/tune_experts.py` found on an H200."""
EXACT = Tile(up=(32, 32), down=(32, 32), warps=4, stages=2)
"""fp32 is multiplied without tensor cores, from registers, where more would not fit."""


def choices_per_tile(choices: int, experts: int) -> int:
    """The smallest tile that holds an expert's share if choices are even."""
    return next((tile for tile in TILES if tile * experts >= choices), max(TILES))


def can_copy(gate_up: Tensor, down: Tensor) -> bool:
    """Whether TMA can copy tiles of the weights: of 16-bit types, with rows at multiples of 16 bytes."""
    return has_tma(down.device) and all(
        t.element_size() == 2 and t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0 for t in (gate_up, down)
    )


def fused_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None
) -> Tensor:
    """Reads no tensor on the host and adds without atomics, so it can be captured and gives the same bits each time."""
    tokens, top_k = slots.shape
    experts, hidden, size = down.shape
    if not (gate_up.is_contiguous() and down.is_contiguous() and slots.is_contiguous() and weights.is_contiguous()):
        raise ValueError("expert matrices, weights and slots must be contiguous")
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    exact, alone, choices = x.dtype == torch.float32, tokens == 1, tokens * top_k
    per_tile = 16 if exact or alone else choices_per_tile(choices, experts)
    tile = EXACT if exact else ALONE if alone else TILES[per_tile]
    if alone:
        tiles, tables = choices, (slots,) * 4
    else:
        plan = experts_plan(slots, experts, per_tile)
        tiles, tables = plan.tiles, (plan.order, plan.expert, plan.first, plan.last)
    inner = torch.empty(choices, size, dtype=x.dtype, device=x.device)
    values = torch.empty(choices, hidden, dtype=x.dtype, device=x.device)
    shared_options = {"M": per_tile, "GROUP": TILES_SHARING, "num_warps": tile.warps, "num_stages": tile.stages}
    shared_options |= options(x)
    (up_n, up_k), (down_n, down_k) = tile.up, tile.down
    up_programs, down_programs = tiles * triton.cdiv(size, up_n), tiles * triton.cdiv(hidden, down_n)
    if tile.tma and not alone and can_copy(gate_up, down):
        most = num_multiprocessors(x.device)
        both = TensorDescriptor.from_tensor(gate_up.view(2 * experts, size, hidden), [2, up_n, up_k])
        gate_up_tma_kernel[(min(up_programs, most),)](
            x, both, inner, slots, *tables, x.stride(0), tiles, size, hidden,
            TOP_K=top_k, N=up_n, K=up_k, EVEN_K=hidden % up_k == 0, **shared_options,
        )  # fmt: skip
        down_tma_kernel[(min(down_programs, most),)](
            TensorDescriptor.from_tensor(inner, [per_tile, down_k]),
            TensorDescriptor.from_tensor(down, [1, down_n, down_k]),
            values, slots, *tables, tiles, size, hidden,
            N=down_n, K=down_k, **shared_options,
        )  # fmt: skip
    else:
        gate_up_kernel[(up_programs,)](
            x, gate_up, inner, slots, *tables, x.stride(0), tiles, size, hidden,
            TOP_K=top_k, N=up_n, K=up_k, EVEN_K=hidden % up_k == 0, ALONE=alone, **shared_options,
        )  # fmt: skip
        down_kernel[(down_programs,)](
            inner, down, values, slots, *tables, tiles, size, hidden,
            N=down_n, K=down_k, EVEN_K=size % down_k == 0, ALONE=alone, **shared_options,
        )  # fmt: skip
    block = min(triton.next_power_of_2(hidden), COMBINED)
    combine_kernel[(tokens, triton.cdiv(hidden, block))](
        values, weights, slots, shared if shared is not None else x, out,
        shared.stride(0) if shared is not None else 0, hidden,
        TOP_K=top_k, BLOCK=block, SHARED=shared is not None, num_warps=4, **options(x),
    )  # fmt: skip
    return out
