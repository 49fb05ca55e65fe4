"""AWQ (`awq`) in its packing for matrix products."""

from __future__ import annotations

from rapid_infer.quant.families.gptq import scale_dtype
from rapid_infer.quant.fields import names_any
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.int4 import AwqFormat
from rapid_infer.quant.scheme import FileScheme
from rapid_infer.quant.stored import StoredPart


class AwqScheme(FileScheme):
    name = "awq"

    def read(self) -> None:
        fields = self.fields
        fields.one_of("w_bit" if "w_bit" in fields.values else "bits", 4)
        fields.one_of("version", "gemm", default="gemm")
        self.group = fields.group("q_group_size" if "q_group_size" in fields.values else "group_size")
        self.zero_point = fields.one_of("zero_point", True, False, default=True)
        listed = fields.get("modules_to_not_convert") or []
        self.listed = names_any(["lm_head", *listed])

    def format(self, part: StoredPart) -> Format:
        zeros = self.zero_point if part.tensors is None else "qzeros" in part.tensors
        return AwqFormat(self.group, not zeros, scale_dtype=scale_dtype(part, "scales"))
