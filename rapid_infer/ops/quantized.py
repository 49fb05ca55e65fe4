"""A quantized matrix as the operators take it: three forms, to which all checkpoint formats are converted.

    form  values                                    scale                                     an entry of the matrix
    fp8   float8_e4m3fn `[n, k]`                    fp32 `[ceil(n / gn), ceil(k / gk)]`       `value * scale`
    int4  codes 0..15, packed                       fp32, fp16, bf16 `[n, ceil(k / gk)]`      `(code - zero) * scale`
    fp4   e2m1 codes, packed                        e4m3, e8m0 or fp32 `[n, ceil(k / gk)]`    `code * scale * row_scale`

with `group = (gn, gk)`: entry (i, j) has the scale at `[i // gn, j // gk]`. Scales of bytes (uint8) are e8m0. Experts
have one more dimension before all others, of values, scale, zero and row_scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = ("fp8", "int4", "fp4")
PACKED = 128
"""Columns of a packed block of 64 bytes: the low half of byte `16 t + 4 s + 2 j + h` is column `32 t + 4 s + 2 h + j`
and its high half that 16 further: what a thread of a tensor core needs lies together, see `triton.quantized`.
"""
CONSTANT_ZERO = 8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of codes 0 to 7; 8 to 15 are their negatives."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """See the module. `shape` is `(n, k)`; `zero` uint8 like scale, None for the constant 8 (int4 alone); `row_scale`
    fp32 `[n]`, None for ones (fp4 alone). Group sizes of packed forms are 1 and a multiple of 16, or all of k.
    """

    form: str
    values: Tensor
    scale: Tensor
    shape: tuple[int, int]
    group: tuple[int, int]
    zero: Tensor | None = None
    row_scale: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
        """The same with each of its tensors changed."""
        zero, row_scale = (None if part is None else change(part) for part in (self.zero, self.row_scale))
        return replace(self, values=change(self.values), scale=change(self.scale), zero=zero, row_scale=row_scale)

    def expert(self, index: int) -> QuantizedMatrix:
        """One matrix of a stack of them."""
        return self.each(lambda part: part[index])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scale, self.zero, self.row_scale) if part is not None)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0..15 uint8 `[..., k]` to bytes `[..., ceil(k / 128) * 64]`; see PACKED. e2m1 codes are packed alike."""
    padded = F.pad(codes, (0, -codes.shape[-1] % PACKED))
    # Blocks, quarters, halves, then s, h and j.
    low, high = padded.unflatten(-1, (-1, 4, 2, 4, 2, 2)).transpose(-2, -1).unbind(-4)
    return (low | high << 4).flatten(-5)


def unpack_int4(packed: Tensor, k: int) -> Tensor:
    """The first k codes uint8 `[..., k]` of what `pack_int4` made."""
    blocks = packed.unflatten(-1, (-1, 4, 4, 2, 2)).transpose(-2, -1)
    return torch.stack((blocks & 15, blocks >> 4), -4).flatten(-6)[..., :k].contiguous()


def scale_values(scale: Tensor) -> Tensor:
    """Scales in fp32."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponent = scale.view(torch.uint8).to(torch.int32)
        # 2^(e - 127): the exponent's own bits, and for e = 0, which those cannot say, a subnormal.
        return torch.where(exponent > 0, exponent << 23, 1 << 22).view(torch.float32)
    return scale.float()


def expand(scale: Tensor, shape: tuple[int, int], group: tuple[int, int]) -> Tensor:
    """Scales `[..., ceil(n / gn), ceil(k / gk)]` to one for each entry, `[..., n, k]`."""
    for dim, (size, of) in zip((-2, -1), zip(shape, group)):
        if scale.shape[dim] != size:
            scale = scale.repeat_interleave(of, dim).narrow(dim, 0, size)
    return scale
