"""4-bit integers with scales for groups of inputs, as GPTQ, AWQ and compressed-tensors store them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.errors import WeightError
from rapid_infer.ops.quantized import CONSTANT_ZERO, QuantizedMatrix, pack_int4
from rapid_infer.quant.checks import scales
from rapid_infer.quant.formats.base import (
    DUMMY_DEVIATION,
    PACKED_GROUP,
    Converted,
    Format,
    by_expert,
    check_share,
    dummy_full,
    nibbles,
    refuse_zero_scales,
    spread,
)
from rapid_infer.quant.param_spec import IN, OUT, PART, Dim, Noise, ParamSpec

PACK = 8
"""4-bit values in an int32."""
STEPS = 2.5
"""Codes to a standard deviation of dummy weights."""
DUMMY_SCALE = DUMMY_DEVIATION / STEPS
RUN = 32
"""Columns that runs of a group are multiples of where they are filled up."""
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in an int32 its outputs stand, the lowest bits first."""


def dummy_codes(noise: Noise, shape: tuple[int, ...]) -> Tensor:
    codes = (noise((*shape, PACK)) * STEPS + CONSTANT_ZERO).round().clamp(0, 15).to(torch.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.int32).squeeze(-1)


def dummy_zeros(stored: int) -> Any:
    word = int.from_bytes(bytes([stored | stored << 4]) * 4, "little", signed=True)
    return lambda noise, shape: torch.full_like(noise(shape), word, dtype=torch.int32)


@dataclass(frozen=True)
class Int4Format(Format):
    """A scale, and unless `symmetric` a zero point, for `group` inputs of an output; None: for all of them.

    `ordered`: groups are not runs of inputs, but what the leaf `g_idx` says (act-order).
    """

    form: ClassVar[str] = "int4"
    group: int | None
    symmetric: bool = True
    ordered: bool = False
    scale_dtype: torch.dtype = torch.float16

    @property
    def inputs(self) -> Dim:
        """Of scales: where groups are in any order, a rank's share may need those of all of them."""
        return Dim("input", self.group, whole=self.ordered)

    def check(self, layout: Any, what: str) -> None:
        if not self.ordered:
            check_share(layout.ins, self.group, what)

    def _scale(self, *dims: Dim) -> ParamSpec:
        return ParamSpec(self.scale_dtype, dims, scales, dummy_full(DUMMY_SCALE))

    def _converted(
        self, layout: Any, codes: Tensor, scale: Tensor, zero: Tensor | None, groups: Tensor | None, what: str
    ) -> Converted:
        """codes uint8 `[..., out, in]`, scale and zero uint8 `[..., out, groups]`, groups `[..., parts, in]`."""
        shape, order = (layout.local_out, layout.ins.local), None
        if groups is None:
            dims = (OUT, self.inputs)
            zero = None if zero is None else spread(layout, dims, zero)[0]
            scale, group = spread(layout, dims, scale)
        else:
            columns, entries, width = _in_order(self._groups_of(groups, layout.ins, scale.shape[-1], what))
            scale = scale[..., entries].contiguous()
            zero = None if zero is None else zero[..., entries].contiguous()
            if columns != list(range(shape[1])):
                order = torch.tensor(columns, device=codes.device)
                codes = F.pad(codes, (0, 1))[..., order]
            shape, group = (shape[0], len(columns)), (1, width)
        matrix = QuantizedMatrix("int4", by_expert(pack_int4, codes), scale, shape, group, zero)
        refuse_zero_scales(what, matrix)
        return Converted(matrix, order)

    def _groups_of(self, groups: Tensor, ins: Any, count: int, what: str) -> list[int]:
        """Each input's group, which must be the same for all parts, and for all experts."""
        if groups.is_meta:
            return [feature // (self.group or ins.size) for feature in range(ins.start, ins.stop)]
        rows = groups.flatten(0, -2)
        if (rows != rows[0]).any():
            raise WeightError(f"{what}: g_idx differs between its parts or experts; expected one order for one input")
        found = rows[0].tolist()
        if found and not 0 <= min(found) <= max(found) < count:
            raise WeightError(f"{what}: g_idx has groups {min(found)} to {max(found)}; expected 0 to {count - 1}")
        return found


def _in_order(groups: list[int]) -> tuple[list[int], list[int], int]:
    """(which input each column takes, the group of each run of columns, columns in a run), sorted by group.

    Where a rank has unlike numbers of inputs of groups, runs end in columns that take none: input `len(groups)`.
    """
    runs: dict[int, list[int]] = {}
    for feature in sorted(range(len(groups)), key=groups.__getitem__):
        runs.setdefault(groups[feature], []).append(feature)
    if len(runs) > 1 and math.gcd(*map(len, runs.values())) % PACKED_GROUP:
        for run in runs.values():
            run += [len(groups)] * (-len(run) % RUN)
    width = math.gcd(*map(len, runs.values()))
    entries = [group for group, run in runs.items() for _ in range(len(run) // width)]
    return [feature for run in runs.values() for feature in run], entries, width


@dataclass(frozen=True)
class GptqFormat(Int4Format):
    """`qweight` int32 `[in / 8, out]`, `qzeros` int32 `[groups, out / 8]`, `scales` `[groups, out]`, `g_idx` `[in]`.

    `offset`: what zero points are more than stored, 1 in files of the first version.
    """

    offset: int = 1

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        specs = {
            "qweight": ParamSpec(torch.int32, (Dim("input", PACK, packed=True), OUT), dummy=dummy_codes),
            "qzeros": ParamSpec(
                torch.int32,
                (self.inputs, Dim("output", PACK, packed=True)),
                dummy=dummy_zeros(CONSTANT_ZERO - self.offset),
            ),
            "scales": self._scale(self.inputs, OUT),
        }
        return specs | ({"g_idx": ParamSpec(torch.int32, (PART, IN))} if self.ordered else {})

    @property
    def ignored(self) -> Mapping[str, str]:  # type: ignore[override]
        return {} if self.ordered else {"g_idx": "all inputs are of one group"}

    def convert(self, layout: Any, leaves: Mapping[str, Tensor], what: str) -> Converted:
        codes = by_expert(lambda words: nibbles(words.mT)[..., : layout.ins.local], leaves["qweight"])
        zero = _outputs(layout, nibbles(leaves["qzeros"]) + self.offset).mT.contiguous()
        constant = self.symmetric and (zero.is_meta or bool((zero == CONSTANT_ZERO).all()))
        groups = leaves.get("g_idx")
        return self._converted(layout, codes, leaves["scales"].mT, None if constant else zero, groups, what)


@dataclass(frozen=True)
class AwqFormat(Int4Format):
    """`qweight` int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]`, `scales` `[groups, out]`.

    The eight outputs of an int32 stand in the order 0, 2, 4, 6, 1, 3, 5, 7.
    """

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        outputs = Dim("output", PACK, packed=True)
        zeros = {"qzeros": ParamSpec(torch.int32, (self.inputs, outputs), dummy=dummy_zeros(CONSTANT_ZERO))}
        return {
            "qweight": ParamSpec(torch.int32, (IN, outputs), dummy=dummy_codes),
            "scales": self._scale(self.inputs, OUT),
        } | ({} if self.symmetric else zeros)

    def convert(self, layout: Any, leaves: Mapping[str, Tensor], what: str) -> Converted:
        def outputs(words: Tensor) -> Tensor:
            return _outputs(
                layout, nibbles(words).unflatten(-1, (-1, PACK))[..., AWQ_ORDER].flatten(-2)
            ).mT.contiguous()

        zero = outputs(leaves["qzeros"]) if "qzeros" in leaves else None
        return self._converted(layout, by_expert(outputs, leaves["qweight"]), leaves["scales"].mT, zero, None, what)


@dataclass(frozen=True)
class PackedFormat(Int4Format):
    """`weight_packed` int32 `[out, in / 8]`, `weight_scale` `[out, groups]`, `weight_zero_point` int32
    `[out / 8, groups]` and `weight_g_idx` `[in]`, as compressed-tensors writes them.
    """

    ignored: ClassVar[Mapping[str, str]] = {"weight_shape": "the packed weight's own shape says it"}

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        specs = {
            "weight_packed": ParamSpec(torch.int32, (OUT, Dim("input", PACK, packed=True)), dummy=dummy_codes),
            "weight_scale": self._scale(OUT, self.inputs),
        }
        if not self.symmetric:
            dims = (Dim("output", PACK, packed=True), self.inputs)
            specs["weight_zero_point"] = ParamSpec(torch.int32, dims, dummy=dummy_zeros(CONSTANT_ZERO))
        return specs | ({"weight_g_idx": ParamSpec(torch.int32, (PART, IN))} if self.ordered else {})

    def convert(self, layout: Any, leaves: Mapping[str, Tensor], what: str) -> Converted:
        codes = by_expert(lambda words: nibbles(words)[..., : layout.ins.local], leaves["weight_packed"])
        zero = None
        if not self.symmetric:
            zero = _outputs(layout, nibbles(leaves["weight_zero_point"].mT)).mT.contiguous()
        return self._converted(layout, codes, leaves["weight_scale"], zero, leaves.get("weight_g_idx"), what)


def _outputs(layout: Any, values: Tensor) -> Tensor:
    """Of values unpacked along the outputs in the last dimension those that are some: parts end with padding."""
    words = layout.entries(Dim("output", PACK, packed=True)).tolist()
    within = [feature % PACK for shard in layout.outs for feature in range(shard.start, shard.stop)]
    places = [word * PACK + place for word, place in zip(words, within)]
    return values if places == list(range(values.shape[-1])) else values[..., places]
