"""Quantization while loading (`quantization=`): each tensor is rounded as it arrives, so that none is kept in 16 bits.

The scales are of what a rank has of a part: a cut matrix has its own on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rapid_infer.ops.quantized import QuantizedMatrix, unpack_int4
from rapid_infer.ops.quantizers import quantize_fp8, quantize_mxfp4, quantize_nvfp4
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.fp4 import Mxfp4Format, Nvfp4Format
from rapid_infer.quant.formats.fp8 import ROWS, TENSOR, Fp8Format, blocks
from rapid_infer.quant.method import ExpertsMethod, QuantMethod
from rapid_infer.quant.param_spec import OUT
from rapid_infer.quant.plain import PlainMethod, PlainScheme
from rapid_infer.quant.quantized import QuantizedExperts, QuantizedLinear, Quantizer


@dataclass(frozen=True)
class Online:
    format: Format
    quantize: Quantizer


def _fp8(rows: int | None, columns: int | None) -> Quantizer:
    """Sizes of a block; None: all of them."""

    def quantize(weight: Tensor) -> Mapping[str, Tensor]:
        n, k = weight.shape[-2:]
        found = quantize_fp8(weight, rows or n, columns or k)
        return {"weight": found.values, "weight_scale": found.scale}

    return quantize


def _pairs(matrix: QuantizedMatrix) -> Tensor:
    """Codes as files have them, the first of two in the lower half of a byte."""
    codes = unpack_int4(matrix.values, matrix.shape[1])
    return codes[..., ::2] | codes[..., 1::2] << 4


def _nvfp4(weight: Tensor) -> Mapping[str, Tensor]:
    found = quantize_nvfp4(weight)
    assert found.row_scale is not None
    return {"weight": _pairs(found), "weight_scale": found.scale, "weight_scale_2": found.row_scale}


def _mxfp4(weight: Tensor) -> Mapping[str, Tensor]:
    found = quantize_mxfp4(weight)
    return {"weight": _pairs(found), "weight_scale": found.scale.view(torch.uint8)}


ONLINE: Mapping[str, Online] = {
    "fp8": Online(Fp8Format(TENSOR), _fp8(None, None)),
    "fp8_row": Online(Fp8Format(ROWS), _fp8(1, None)),
    "fp8_block": Online(Fp8Format(blocks(128, 128), dynamic="group"), _fp8(128, 128)),
    "nvfp4": Online(Nvfp4Format(outer_dim=OUT), _nvfp4),
    "mxfp4": Online(Mxfp4Format("weight"), _mxfp4),
}


class OnlineScheme(PlainScheme):
    """Linear layers and experts; the head, the router and what is absorbed (`kv_b_proj`) stay as they are."""

    def __init__(self, name: str) -> None:
        self.name, self.online = name, ONLINE[name]

    def method(self, module: str) -> QuantMethod:
        if module.rsplit(".", 1)[-1] == "kv_b_proj":
            return PlainMethod()
        return QuantizedLinear(self.online.format, quantize=self.online.quantize)

    def experts(self, module: str) -> ExpertsMethod:
        return QuantizedExperts(self.online.format, quantize=self.online.quantize)
