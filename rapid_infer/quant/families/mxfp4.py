"""MXFP4 experts as gpt-oss has them (`mxfp4`): all experts in one tensor of blocks and one of scales."""

from __future__ import annotations

from rapid_infer.quant.fields import names_any
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.fp4 import Mxfp4Format
from rapid_infer.quant.scheme import FileScheme
from rapid_infer.quant.stored import StoredPart


class Mxfp4Scheme(FileScheme):
    name = "mxfp4"

    def read(self) -> None:
        self.listed = names_any(self.fields.get("modules_to_not_convert"))

    def excluded(self, name: str) -> bool:
        return "experts" not in name.split(".") or self.listed(name)

    def format(self, part: StoredPart) -> Format:
        return Mxfp4Format("blocks", "scales", blocked=True)
