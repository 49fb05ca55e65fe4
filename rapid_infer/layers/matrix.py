"""The base of all layers that multiply by a matrix, whose parameters are what a weight format makes of it."""

from __future__ import annotations

from collections.abc import Mapping

from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.layout import ExpertAxis, MatrixLayout
from rapid_infer.layers.module import LayerModule
from rapid_infer.layers.parameter import Part, Placement
from rapid_infer.quant.param_spec import ParamSpec


class MatrixModule(LayerModule):
    """A parameter for each of `specs`, by leaf name, of the size that `layout` gives it on this rank.

    `experts`: a matrix of each expert, along a dimension that comes first.
    """

    def __init__(
        self, ctx: BuildContext, layout: MatrixLayout, specs: Mapping[str, ParamSpec], experts: ExpertAxis | None = None
    ) -> None:
        super().__init__()
        self.ctx_name, self.parallel = ctx.name, ctx.parallel
        self.layout, self.specs, self.experts = layout, specs, experts
        leading = () if experts is None else (experts.local,)
        for leaf, spec in specs.items():
            self.register_parameter(leaf, layout.parameter(spec, f"{ctx.name}.{leaf}", *leading))

    def parts(self, leaf: str) -> tuple[Part, ...]:
        return self.layout.parts

    def placement(self, leaf: str, part: Part, expert: int | None = None) -> Placement | None:
        spec = self.specs[leaf]
        one = self.layout.placement(self.get_parameter(leaf), spec, part)
        if self.experts is not None:
            return self.experts.placement(one, expert)
        if expert is not None:
            raise KeyError(f"{self.ctx_name} has no experts")
        return one
