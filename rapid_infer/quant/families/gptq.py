"""GPTQ (`gptq`), and auto-round, which packs like GPTQ or AWQ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from rapid_infer.errors import ConfigError
from rapid_infer.quant.fields import Fields, names_any
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.int4 import AwqFormat, GptqFormat
from rapid_infer.quant.scheme import FileScheme
from rapid_infer.quant.stored import StoredPart

VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""What zero points are more than stored."""


def scale_dtype(part: StoredPart, leaf: str) -> torch.dtype:
    """fp16 scales stay so; others are kept in fp32."""
    return torch.float16 if part.dtype(leaf, torch.float16) == torch.float16 else torch.float32


class GptqScheme(FileScheme):
    """4 bits in files of both versions, with or without zero points and act-order; `dynamic` rules by module."""

    name = "gptq"

    def read(self) -> None:
        fields = self.fields
        fields.one_of("pack_dtype", "int32", default="int32")
        version = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
        self.offset = VERSIONS[fields.one_of(version, *VERSIONS, default="gptq")]
        self._settings(fields)
        self.lists_head = fields.one_of("lm_head", True, False, default=False)
        inside = fields.get("modules_in_block_to_quantize")
        names = [name for group in inside or () for name in ([group] if isinstance(group, str) else group)]
        self.inside = names_any(names) if names else None
        self.rules = []
        for rule, values in (fields.get("dynamic") or {}).items():
            kind, _, pattern = rule.rpartition(":")
            if kind not in ("+", "-", ""):
                raise fields.error("dynamic", "rules such as '+:regex' and '-:regex'")
            try:
                expression = re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"quantization_config has the dynamic rule {rule!r}: {error}") from error
            self.rules.append((expression, None if kind == "-" else values or {}))

    def _settings(self, fields: Fields) -> tuple[int | None, bool]:
        """(inputs of a group, whether without zero points)"""
        fields.one_of("bits", 4)
        fields.one_of("desc_act", True, False, default=False)
        return fields.group(), fields.one_of("sym", True, False, default=True)

    def _rule(self, name: str) -> Mapping[str, Any] | None:
        """Settings of the first dynamic rule for `name`, none where there is no such; None: it is left plain."""
        return next((values for expression, values in self.rules if expression.match(name)), {})

    def excluded(self, name: str) -> bool:
        if name.rsplit(".", 1)[-1] == "lm_head" and not self.lists_head:
            return True
        return self._rule(name) is None or (self.inside is not None and not self.inside(name))

    def format(self, part: StoredPart) -> Format:
        group, symmetric = self._settings(Fields({**self.fields.values, **(self._rule(part.name) or {})}))
        ordered = group is not None and "g_idx" in (part.tensors or ())
        return GptqFormat(group, symmetric, ordered, scale_dtype(part, "scales"), self.offset)


class AutoRoundScheme(GptqScheme):
    """`packing_format` says which of the two it is; which modules are quantized is seen in the files."""

    name = "auto-round"

    def read(self) -> None:
        packing = self.fields.one_of(
            "packing_format", "auto_round:auto_gptq", "auto_gptq", "auto_round:auto_awq", "auto_awq",
            default="auto_round:auto_gptq",
        )  # fmt: skip
        self.awq = packing.endswith("awq")
        super().read()

    def format(self, part: StoredPart) -> Format:
        if not self.awq:
            return super().format(part)
        group, symmetric = self._settings(self.fields)
        has_zeros = not symmetric if part.tensors is None else "qzeros" in part.tensors
        return AwqFormat(group, not has_zeros, scale_dtype=scale_dtype(part, "scales"))
