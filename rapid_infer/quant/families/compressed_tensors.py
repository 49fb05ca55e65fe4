"""compressed-tensors: groups of modules, each with a description of its weights and activations."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from rapid_infer.errors import ConfigError
from rapid_infer.quant.families.gptq import scale_dtype
from rapid_infer.quant.fields import Fields
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.fp4 import Mxfp4Format, Nvfp4Format
from rapid_infer.quant.formats.fp8 import ROWS, TENSOR, Fp8Format, blocks
from rapid_infer.quant.formats.int4 import PackedFormat
from rapid_infer.quant.param_spec import OUT, Dim
from rapid_infer.quant.scheme import FileScheme
from rapid_infer.quant.stored import StoredPart

logger = logging.getLogger(__name__)

Named = Callable[[str], bool]
Make = Callable[[StoredPart], Format]
STORED = {
    "float8": ("float-quantized", "naive-quantized", "mxfp8-quantized"),
    "float4": ("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    "int4": ("pack-quantized",),
}
"""What weights of a type may be stored as."""


@dataclass(frozen=True)
class Group:
    named: Named
    make: Make


class CompressedTensorsScheme(FileScheme):
    name = "compressed-tensors"

    def read(self) -> None:
        fields = self.fields
        if (fields.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise fields.error("sparsity_config", "none: weights that are not sparse")
        if fields.get("transform_config"):
            raise fields.error("transform_config", "none: weights that are not rotated")
        fields.one_of("quantization_status", "compressed", "frozen", "initialized", default="compressed")
        # A class is a whole word here, and names are whole names.
        self.listed = _targets([name for name in fields.get("ignore") or [] if name != "Linear"])
        found = [self._group(name) for name in fields.get("config_groups") or {}]
        self.groups = [group for group in found if group is not None]
        if not self.groups:
            raise fields.error("config_groups", "a group of linear layers")

    def _group(self, name: str) -> Group | None:
        group = Fields(self.fields.values["config_groups"][name], f"quantization_config.config_groups.{name}")
        targets = group.get("targets") or []
        if targets and all(str(target).endswith("Attention") for target in targets):
            return None  # of the KV cache
        if group.get("output_activations"):
            raise group.error("output_activations", "none")
        weights = group.sub("weights")
        if weights is None:
            raise group.error("weights", "a description of quantized weights")
        stored = group.get("format") or self.fields.get("format")
        return Group(_targets(targets), _maker(weights, group.sub("input_activations"), stored))

    def excluded(self, name: str) -> bool:
        return self.listed(name) or not any(group.named(name) for group in self.groups)

    def format(self, part: StoredPart) -> Format:
        chosen = next((group for group in self.groups if group.named(part.name)), self.groups[0])
        return chosen.make(part)


def _targets(targets: list[str]) -> Named:
    """Linear (every module that is asked about is one), whole names, and "re:" with an expression for their start."""
    exact = {target for target in targets if not target.startswith("re:")}
    try:
        expressions = [re.compile(target[3:]) for target in targets if target.startswith("re:")]
    except re.error as error:
        raise ConfigError(f"quantization_config has the target {error.pattern!r}: {error}") from error
    return lambda name: bool(exact & {"Linear", name}) or any(one.match(name) for one in expressions)


def _maker(weights: Fields, inputs: Fields | None, stored: str | None) -> Make:
    kind = f"{weights.one_of('type', 'int', 'float')}{weights.one_of('num_bits', 4, 8)}"
    if kind not in STORED:
        raise weights.error("num_bits", "4 with type 'int', 4 or 8 with type 'float'")
    if stored is not None and stored not in (*STORED[kind], "mixed-precision"):
        raise ConfigError(
            f"{weights.where} of type {kind} are stored as format={stored!r}, which is not supported: expected "
            f"{' or '.join(map(repr, STORED[kind]))}"
        )
    if weights.get("dynamic"):
        raise weights.error("dynamic", "false")
    return {"float8": _fp8, "float4": _fp4, "int4": _int4}[kind](weights, inputs)


def _fp8(weights: Fields, inputs: Fields | None) -> Make:
    strategy = weights.one_of("strategy", "tensor", "channel", "block", "group", default="tensor")
    dims = {"tensor": TENSOR, "channel": ROWS}.get(strategy)
    exponents = strategy == "group"
    if strategy == "block":
        block = weights.block("block_structure")
        if block is None:
            raise weights.error("block_structure", "two sizes such as [128, 128]")
        dims = blocks(*block)
    elif exponents:
        dims = (OUT, Dim("input", weights.group()))
    assert dims is not None
    static, dynamic = False, "none"
    if inputs is not None:
        static = not inputs.one_of("dynamic", True, False, default=False)
        by = inputs.one_of("strategy", "tensor", "token", "group", default="tensor")
        dynamic = "group" if by == "group" else "token"
    return lambda part: Fp8Format(
        dims,
        input_scale="input_scale" if static else None,
        dynamic=dynamic,
        exponents=exponents,
    )


def _fp4(weights: Fields, inputs: Fields | None) -> Make:
    if weights.one_of("strategy", "tensor_group", "group") == "group":
        weights.one_of("group_size", 32)
        return lambda part: Mxfp4Format()
    weights.one_of("group_size", 16)
    return lambda part: Nvfp4Format("weight_packed", "weight_global_scale", divides=True)


def _int4(weights: Fields, inputs: Fields | None) -> Make:
    strategy = weights.one_of("strategy", "group", "channel")
    group = weights.group() if strategy == "group" else None
    symmetric = weights.one_of("symmetric", True, False, default=True)
    weights.one_of("actorder", "group", "weight", "static", "dynamic", True, False, default=None)
    if inputs is not None:
        logger.info("%s: activations are not quantized beside 4-bit integers, which is more exact", inputs.where)

    def make(part: StoredPart) -> Format:
        ordered = group is not None and "weight_g_idx" in (part.tensors or ())
        return PackedFormat(group, symmetric, ordered, scale_dtype(part, "weight_scale"))

    return make
