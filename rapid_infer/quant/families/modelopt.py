"""NVIDIA's modelopt (`modelopt`, `modelopt_fp4`): one algorithm for all modules, or one each (MIXED_PRECISION)."""

from __future__ import annotations

from rapid_infer.quant.families.fp8 import SCALES, stored_dims
from rapid_infer.quant.fields import Fields, names_any
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.fp4 import Nvfp4Format
from rapid_infer.quant.formats.fp8 import ROWS, TENSOR, Fp8Format, blocks
from rapid_infer.quant.param_spec import OUT, Dim
from rapid_infer.quant.scheme import FileScheme
from rapid_infer.quant.stored import StoredPart

FP8 = {
    "fp8": Fp8Format(TENSOR, input_scale="input_scale"),
    "fp8_per_channel_per_token": Fp8Format(ROWS),
    "fp8_pb_wo": Fp8Format(blocks(128, 128), dynamic="none"),
    "mxfp8": Fp8Format((OUT, Dim("input", 32)), dynamic="group", exponents=True),
}
NVFP4 = ("nvfp4", "nvfp4_awq", "w4a16_nvfp4", "w4a8_nvfp4_fp8")
ALGORITHMS = (*FP8, *NVFP4)


class ModeloptScheme(FileScheme):
    name = "modelopt"

    def read(self) -> None:
        fields = self.fields
        listed = [fields.get(name) or [] for name in ("exclude_modules", "ignore")]
        self.listed = names_any([name for names in listed for name in names])
        each = fields.sub("quantized_layers") or Fields({})
        self.algorithm = fields.one_of("quant_algo", *ALGORITHMS, "mixed_precision")
        self.each = {name: _algorithm(Fields(values, f"{each.where}.{name}")) for name, values in each.values.items()}
        if self.algorithm == "mixed_precision" and not self.each:
            raise fields.error("quantized_layers", "an algorithm for each quantized layer")
        if self.algorithm in NVFP4:
            fields.one_of("group_size", 16, default=16)

    def excluded(self, name: str) -> bool:
        return self.listed(name) or (self.algorithm == "mixed_precision" and name not in self.each)

    def format(self, part: StoredPart) -> Format:
        algorithm = self.each.get(part.name, self.algorithm)
        if algorithm == "mixed_precision":
            algorithm = next(iter(self.each.values()))
        if algorithm in NVFP4:
            return Nvfp4Format(multiplier="pre_quant_scale" in (part.tensors or ()))
        found = FP8[algorithm]
        scale = part.leaf("weight_scale", *SCALES)
        has_input = found.input_scale if part.tensors is None or "input_scale" in part.tensors else None
        return Fp8Format(
            stored_dims(part, scale, found.dims), scale, has_input, found.dynamic, exponents=found.exponents
        )


def _algorithm(fields: Fields) -> str:
    found = fields.one_of("quant_algo", *ALGORITHMS)
    if found in NVFP4:
        fields.one_of("group_size", 16, default=16)
    return found
