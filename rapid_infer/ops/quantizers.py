"""Quantizes matrices: round to nearest, scales from the largest magnitude of a group. `weight` `[..., n, k]`, any
float type, on any device; a group whose weights are all zero has scale 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops.quantized import CONSTANT_ZERO, E2M1, QuantizedMatrix, expand, pack_int4, scale_values

FP8_MAX = 448.0
NVFP4_GROUP, MXFP4_GROUP = 16, 32


def quantize_fp8(weight: Tensor, group_n: int, group_k: int) -> QuantizedMatrix:
    """A scale for each block: (n, k) is the whole matrix, (1, k) a row, (128, 128) as DeepSeek and Qwen do."""
    n, k = weight.shape[-2:]
    weight, shape, group = weight.float(), (n, k), (group_n, group_k)
    padded = F.pad(weight.abs(), (0, -k % group_k, 0, -n % group_n))
    largest = padded.unflatten(-1, (-1, group_k)).amax(-1).unflatten(-2, (-1, group_n)).amax(-2)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    values = (weight / expand(scale, shape, group)).clamp(-FP8_MAX, FP8_MAX)
    return QuantizedMatrix("fp8", values.to(torch.float8_e4m3fn), scale, shape, group)


def quantize_int4(weight: Tensor, group_k: int, symmetric: bool = True) -> QuantizedMatrix:
    """`(code - 8) * scale`, or with a zero point for each group; the last group may be smaller."""
    blocks, shape = _groups(weight, group_k)
    if symmetric:
        scale, zero = _or_one(blocks.abs().amax(-1) / 7), None
        offset = torch.full_like(scale, CONSTANT_ZERO)
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = _or_one((high - low) / 15)
        offset = (-low / scale).round()
        zero = offset.to(torch.uint8)
    codes = ((blocks / scale.unsqueeze(-1)).round() + offset.unsqueeze(-1)).clamp(0, 15).to(torch.uint8)
    return QuantizedMatrix("int4", pack_int4(codes.flatten(-2)[..., : shape[1]]), scale, shape, (1, group_k), zero)


def quantize_mxfp4(weight: Tensor) -> QuantizedMatrix:
    """e2m1 with a power of two for 32 inputs: of the exponents by rounding down and up, that of the smaller error."""
    blocks, shape = _groups(weight, MXFP4_GROUP)
    largest = _or_one(blocks.abs().amax(-1))
    exponents = (largest.log2().floor() - 2, (largest / 6).log2().ceil())
    bytes_ = [(e + 127).clamp(0, 254).to(torch.uint8) for e in exponents]
    codes, scale = _best_fp4(blocks, bytes_)
    return QuantizedMatrix("fp4", pack_int4(codes.flatten(-2)[..., : shape[1]]), scale, shape, (1, MXFP4_GROUP))


def quantize_nvfp4(weight: Tensor) -> QuantizedMatrix:
    """e2m1 with an e4m3 scale for 16 inputs and an fp32 one for the row: the largest magnitude becomes 6, or 4, which
    has finer steps below it, where the error is smaller.
    """
    blocks, shape = _groups(weight, NVFP4_GROUP)
    row_scale = _or_one(blocks.abs().amax((-2, -1)) / (E2M1[-1] * FP8_MAX))
    largest = blocks.abs().amax(-1) / row_scale.unsqueeze(-1)
    scales = [(largest / top).clamp(2**-9, FP8_MAX).to(torch.float8_e4m3fn) for top in (6, 4)]
    codes, scale = _best_fp4(blocks / row_scale[..., None, None], scales)
    packed = pack_int4(codes.flatten(-2)[..., : shape[1]])
    return QuantizedMatrix("fp4", packed, scale, shape, (1, NVFP4_GROUP), row_scale=row_scale)


def e2m1_codes(values: Tensor) -> Tensor:
    """The nearest codes, of ties the even one; uint8."""
    magnitude, code = values.abs(), torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for i, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        code += (magnitude >= middle) if i % 2 else (magnitude > middle)
    return code | (values < 0).to(torch.uint8) << 3


def _groups(weight: Tensor, group_k: int) -> tuple[Tensor, tuple[int, int]]:
    """(fp32 `[..., n, groups, group_k]`, zeros behind the end; (n, k))."""
    n, k = weight.shape[-2:]
    return F.pad(weight.float(), (0, -k % group_k)).unflatten(-1, (-1, group_k)), (n, k)


def _or_one(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def _best_fp4(blocks: Tensor, scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(codes, scale) of those scales that leave each group the smaller squared error; of equals the first."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=blocks.device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for scale in scales:
        wide = scale_values(scale).unsqueeze(-1)
        codes = e2m1_codes(blocks / wide)
        found.append((codes, scale.view(torch.uint8), (table[codes.int()] * wide - blocks).square().sum(-1)))
    (codes, scale, error), (others, other, more) = found
    better = more < error
    chosen = torch.where(better, other, scale).view(scales[0].dtype)
    return torch.where(better.unsqueeze(-1), others, codes), chosen
