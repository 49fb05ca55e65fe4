"""FP8 as Qwen and DeepSeek publish it (`fp8`), and rows of fbgemm (`fbgemm_fp8`)."""

from __future__ import annotations

import torch

from rapid_infer.quant.fields import names_any
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.fp4 import Mxfp4Format
from rapid_infer.quant.formats.fp8 import ROWS, TENSOR, Fp8Format, blocks
from rapid_infer.quant.param_spec import OUT, Dim
from rapid_infer.quant.scheme import FileScheme
from rapid_infer.quant.stored import StoredPart

SCALES = ("weight_scale_inv", "weight_scale", "scale")
INPUT_SCALES = ("input_scale", "activation_scale")
BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)


def stored_dims(part: StoredPart, scale: str, declared: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """What the scale runs over, by its shape where that is a scalar or a row's: files and configs differ in it."""
    shape, weight = part.shape(scale), part.shape("weight")
    if shape is None or weight is None or len(weight) != 2:
        return declared
    if shape in ((), (1,)):
        return TENSOR
    if shape == (weight[0],):
        return (OUT,)
    return ROWS if shape == (weight[0], 1) and len(declared) == 1 else declared


class Fp8Scheme(FileScheme):
    """`quant_method` fp8: `weight_block_size` or a scale for each matrix, `expert_dtype` fp4."""

    name = "fp8"

    def read(self) -> None:
        fields = self.fields
        fields.one_of("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
        fields.one_of("scale_fmt", "ue8m0", "float", default=None)
        self.static = fields.one_of("activation_scheme", "dynamic", "static", default="dynamic") == "static"
        self.block = fields.block("weight_block_size")
        if self.block is not None and self.static:
            raise fields.error("activation_scheme", "'dynamic' with weight_block_size")
        self.fp4_experts = fields.one_of("expert_dtype", "fp4", "fp8", default="fp8") == "fp4"
        listed = [fields.get(name) or [] for name in ("modules_to_not_convert", "ignored_layers")]
        self.listed = names_any(["lm_head", *(name for names in listed for name in names)])

    def format(self, part: StoredPart) -> Format:
        expert = self.fp4_experts and "experts" in part.name.split(".")
        if part.dtype("weight", torch.uint8 if expert else torch.float8_e4m3fn) in BYTES:
            return Mxfp4Format("weight", part.leaf("scale", *SCALES))
        scale = part.leaf(*SCALES)
        declared = TENSOR if self.block is None else blocks(*self.block)
        inputs = part.leaf(*INPUT_SCALES)
        static = self.static if part.tensors is None or self.static else inputs in part.tensors
        dims = stored_dims(part, scale, declared)
        return Fp8Format(
            dims,
            scale,
            inputs if static else None,
            "group" if dims is declared and self.block is not None else "token",
            exponents=part.dtype(scale, torch.float32) in BYTES,
        )


class FbgemmScheme(FileScheme):
    """`quant_method` fbgemm_fp8: a scale for each row; `activation_scale_ub`, which clips inputs, is left out."""

    name = "fbgemm_fp8"

    def read(self) -> None:
        self.listed = names_any(["lm_head", *(self.fields.get("modules_to_not_convert") or [])])

    def format(self, part: StoredPart) -> Format:
        return Fp8Format(stored_dims(part, "weight_scale", ROWS))
