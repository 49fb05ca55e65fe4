"""The base of all layers that multiply by a matrix, whose parameters are what a weight format makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.layout import ExpertAxis, MatrixLayout
from rapid_infer.layers.module import LayerModule
from rapid_infer.layers.parameter import Part, Placement
from rapid_infer.quant.param_spec import ParamSpec


class MatrixModule(LayerModule):
    """A parameter for each of `specs`, by leaf name, of the size that `layout` gives it on this rank.

    `experts`: a matrix of each expert, along a dimension that comes first. `quant`: the weight format, of which an
    attribute `ignored` names leaves that it has no use for, and `quantize`, if there is one, makes its parameters of
    plain weights as they are read; the parameters then lie as in `stored_layout`.
    """

    def __init__(
        self,
        ctx: BuildContext,
        layout: MatrixLayout,
        specs: Mapping[str, ParamSpec],
        experts: ExpertAxis | None = None,
        quant: Any = None,
    ) -> None:
        super().__init__()
        self.ctx_name, self.parallel = ctx.name, ctx.parallel
        self.layout, self.specs, self.experts = layout, specs, experts
        self.ignored: Mapping[str, str] = getattr(quant, "ignored", {})
        self._quantize: Callable[[Tensor], Mapping[str, Tensor]] | None = getattr(quant, "quantize", None)
        self.stored_layout = layout if self._quantize is None else layout.alone()
        self._plain = ParamSpec(ctx.dtype)
        leading = () if experts is None else (experts.local,)
        for leaf, spec in specs.items():
            self.register_parameter(leaf, self.stored_layout.parameter(spec, f"{ctx.name}.{leaf}", *leading))

    def parts(self, leaf: str) -> tuple[Part, ...]:
        made = self._quantize is not None and leaf not in ("weight", "bias")
        return () if made else self.layout.parts

    def placement(self, leaf: str, part: Part, expert: int | None = None) -> Placement | None:
        spec = self.specs[leaf]
        if self._quantize is not None and leaf == "weight":
            return self._quantized_placement(part, expert)
        return self._of_expert(self.layout.placement(self.get_parameter(leaf), spec, part), expert)

    def _of_expert(self, one: Placement, expert: int | None) -> Placement | None:
        if self.experts is not None:
            return self.experts.placement(one, expert)
        if expert is not None:
            raise KeyError(f"{self.ctx_name} has no experts")
        return one

    def _quantized_placement(self, part: Part, expert: int | None) -> Placement | None:
        """Where plain weights go, which become all parameters but the bias."""
        plain = self.layout.placement(self.get_parameter("weight"), self._plain, part)
        targets: dict[str, Placement] = {}
        for leaf, spec in self.specs.items():
            if leaf == "bias":
                continue
            stored = self.stored_layout.placement(self.get_parameter(leaf), spec, part)
            found = self._of_expert(replace(stored, shape=plain.shape, source=plain.source), expert)
            if found is None:
                return None
            targets[leaf] = found
        return replace(targets["weight"], store=partial(self._store, targets))

    def _store(self, targets: Mapping[str, Placement], values: Tensor) -> None:
        assert self._quantize is not None
        for leaf, made in self._quantize(values.to(self.get_parameter("weight").device)).items():
            region = targets[leaf].param.data[targets[leaf].target]
            region.copy_(made.reshape(region.shape))
