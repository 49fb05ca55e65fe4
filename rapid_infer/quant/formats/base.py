"""The contract of a stored format, and what formats share: scales over parts and cuts, nibbles, dummy values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from rapid_infer.errors import ConfigError, WeightError
from rapid_infer.ops.quantized import CONSTANT_ZERO, QuantizedMatrix, expand, unpack_int4
from rapid_infer.quant.param_spec import Dim, Noise, ParamSpec

WHOLE = Dim("input", None)
PACKED_GROUP = 16
"""Groups of 4-bit codes are a multiple of it, or the whole row."""
DUMMY_DEVIATION = 0.02
DUMMY_FP8_SCALE = 2.0**-12


@dataclass(frozen=True)
class Converted:
    """A matrix in one of the operators' forms, and what has to be done to inputs before it.

    order        int64 `[k]`: the input that each column of the matrix takes, `inputs` where it takes none
    multiplier   `[inputs]`: what inputs are multiplied by
    input_scale  fp32 `[]`: the static scale of activations
    """

    matrix: QuantizedMatrix
    order: Tensor | None = None
    multiplier: Tensor | None = None
    input_scale: Tensor | None = None


@dataclass(frozen=True)
class Format:
    """How files store a matrix: its leaves, and how they become what operators take. Compared by value.

    `layout` is the layer's `MatrixLayout`. Tensors may have a dimension of experts before those of the matrix.
    """

    form: ClassVar[str]
    ignored: ClassVar[Mapping[str, str]] = {}
    """Leaves that are not needed, each with the reason."""

    @property
    def activation(self) -> str:
        """What inputs are rounded to; see the op quantized_linear."""
        return "none"

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        """The leaves of the matrix that are loaded; `dtype` is that of activations."""
        raise NotImplementedError

    def check(self, layout: Any, what: str) -> None:
        """ConfigError where this rank's share of a matrix cannot be run."""

    def convert(self, layout: Any, leaves: Mapping[str, Tensor], what: str) -> Converted:
        """The matrix that `leaves` hold; `what` names the layer in errors."""
        raise NotImplementedError


def spread(layout: Any, dims: tuple[Dim, ...], scale: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Scales over `dims` as equal groups from the first feature of this rank's matrix: `[..., rows, columns]`, and the
    group (rows, columns) that an entry is for.

    Groups begin anew in each part of a matrix and may be cut by the rank's share, so they can become smaller ones with
    copies of one scale; of no group is a scale changed.
    """
    rows, columns = dims[0], next((dim for dim in dims if dim.over == "input"), WHOLE)
    if scale.ndim == 0 or len(dims) == 1:
        scale = scale.unsqueeze(-1)
    groups: list[int] = []
    for axis, dim in ((-2, rows), (-1, columns)):
        entries = layout.entries(dim).tolist()
        by_feature = dim.over == "part" or (dim.over == "output" and dim.group in (1, None))
        group = 1 if by_feature else _common_group(entries, dim.group or len(entries))
        if (kept := entries[::group]) != list(range(scale.shape[axis])):
            index, dtype = torch.tensor(kept, device=scale.device), scale.dtype
            # One-byte floats have no index_select on the CPU; their bytes have.
            stored = scale.view(torch.uint8) if dtype.itemsize == 1 else scale
            scale = stored.index_select(axis, index).view(dtype)
        groups.append(group)
    return scale.contiguous(), (groups[0], groups[1])


def _common_group(entries: list[int], group: int) -> int:
    """The largest number of features that never holds two entries' when counted from the first."""
    return math.gcd(group, *(i for i, (one, other) in enumerate(pairwise(entries), 1) if one != other))


def check_share(ins: Any, group: int | None, what: str) -> None:
    """ConfigError, with sizes that work, where a rank's share of the inputs leaves too small a piece of a group."""
    size = group or ins.size
    if ins.start // size == (ins.stop - 1) // size or math.gcd(size, -ins.start % size) % PACKED_GROUP == 0:
        return
    fits = [n for n in range(1, 65) if ins.size % n == 0 and ins.size // n % PACKED_GROUP == 0]
    raise ConfigError(
        f"{what}: groups of {size} inputs do not fit this rank's inputs {ins.start} to {ins.stop} of {ins.size}, which "
        f"must begin and end at a multiple of {PACKED_GROUP}; use a tensor_parallel_size of {fits or [1]}"
    )


def nibbles(packed: Tensor) -> Tensor:
    """4-bit values along the last dimension, the lowest bits first: uint8 `[..., n]` of bytes or int32."""
    halves = packed.contiguous().view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), -1).flatten(-2)


def by_expert(change: Callable[[Tensor], Tensor], stacked: Tensor) -> Tensor:
    """`change` of each matrix of a stack, or of one, so that a stack takes no more memory than one of them.

    A result of the same size and type takes the place of what it was made of.
    """
    if stacked.ndim < 3 or stacked.is_meta:
        return change(stacked)
    first = change(stacked[0])
    same = first.shape == stacked[0].shape and first.dtype == stacked.dtype and stacked.is_contiguous()
    out = stacked if same else first.new_empty(len(stacked), *first.shape)
    out[0] = first
    for index in range(1, len(stacked)):
        out[index] = change(stacked[index])
    return out


def refuse_zero_scales(what: str, matrix: QuantizedMatrix) -> None:
    """WeightError for a scale of zero over weights whose codes are not zero."""
    if matrix.scale.is_meta or matrix.scale.dtype == torch.uint8:
        return
    zero = matrix.scale.float() == 0
    if not zero.any():
        return
    if matrix.form == "fp8":
        nonzero = matrix.values.view(torch.uint8) & 127 != 0
    else:
        codes = unpack_int4(matrix.values, matrix.shape[1])
        middle = CONSTANT_ZERO if matrix.zero is None else expand(matrix.zero, matrix.shape, matrix.group)
        nonzero = codes & 7 != 0 if matrix.form == "fp4" else codes != middle
    dead = expand(zero, matrix.shape, matrix.group) & nonzero
    if dead.any():
        index = dead.nonzero()[0].tolist()
        raise WeightError(f"{what}: the scale of weight {index} is zero, and its code is not; the file is damaged")


def dummy_fp8(noise: Noise, shape: tuple[int, ...]) -> Tensor:
    return (noise(shape) * (DUMMY_DEVIATION / DUMMY_FP8_SCALE)).clamp(-448, 448).to(torch.float8_e4m3fn)


def dummy_full(value: float) -> Callable[[Noise, tuple[int, ...]], Tensor]:
    return lambda noise, shape: torch.full_like(noise(shape), value)
