"""Mixture of experts: a router, the routed experts' stacked matrices, and the experts that every token shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rapid_infer.errors import ConfigError
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.layout import ExpertAxis, MatrixLayout, cut_expert, whole
from rapid_infer.layers.matrix import MatrixModule
from rapid_infer.layers.mlp import GatedMLP
from rapid_infer.layers.module import LayerModule
from rapid_infer.ops.reference.route_experts import SCORING
from rapid_infer.parallel.partial_sum import PartialSum, share


@dataclass(frozen=True)
class RouterConfig:
    """Which experts a token gets, and with which weights; see the op route_experts.

    `correction_bias`: the checkpoint has a bias per expert that counts for the choice only.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    correction_bias: bool = False

    def __post_init__(self) -> None:
        """ConfigError for what cannot be routed."""
        if self.scoring not in SCORING:
            raise ConfigError(f"router scores by {self.scoring!r}; expected one of {', '.join(SCORING)}")
        if self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ConfigError(
                f"{self.num_experts} experts cannot be routed in {self.groups} equal groups of which "
                f"{self.top_groups} are kept"
            )
        size = self.num_experts // self.groups
        if not 1 <= self.top_k <= self.top_groups * size:
            raise ConfigError(f"{self.top_k} experts a token, but {self.top_groups} groups of {size} are all there is")
        if self.correction_bias and self.groups > 1 and size < 2:
            raise ConfigError("a group is worth its two best experts, and has one")


class Router(LayerModule):
    """weight `[experts, hidden]` and, if there is one, e_score_correction_bias `[experts]` fp32; whole on every rank.

    `expert_map`: see `Experts`.
    """

    def __init__(self, ctx: BuildContext, hidden_size: int, config: RouterConfig, expert_map: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, dtype=ctx.dtype), requires_grad=False)
        bias = torch.empty(config.num_experts, dtype=torch.float32) if config.correction_bias else None
        self.register_parameter(
            "e_score_correction_bias", None if bias is None else nn.Parameter(bias, requires_grad=False)
        )
        self.expert_map = torch.tensor(expert_map, dtype=torch.int32)
        self._logits = ctx.op("router_logits")
        self._route = ctx.op("route_experts", scoring=config.scoring, groups=config.groups)

    def forward(self, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(weights fp32, slots int32), both `[tokens, top_k]`."""
        config = self.config
        return self._route(
            self._logits(x, self.weight),
            self.e_score_correction_bias,
            token_mask,
            self.expert_map,
            config.top_k,
            config.groups,
            config.top_groups,
            config.scoring,
            config.renormalize,
            config.scale,
        )


class Experts(LayerModule):
    """The routed experts of this rank: gate_up_proj `[local, 2 * size, hidden]`, down_proj `[local, hidden, size]`.

    `expert_map` gives each expert's slot in them (logical to physical), below zero for one that another rank keeps.
    Every expert is cut along `size` over the ranks that keep it.
    """

    def __init__(self, ctx: BuildContext, hidden_size: int, intermediate_size: int, expert_map: Sequence[int]) -> None:
        super().__init__()
        self.quant = ctx.quant.experts(ctx.name)
        specs, axis, what = self.quant.params(ctx.dtype), ExpertAxis(tuple(expert_map)), "features of an expert"
        up, down = ctx.sub("gate_up_proj"), ctx.sub("down_proj")
        halves = tuple(cut_expert(up, name, intermediate_size, what) for name in (0, 1))
        self.gate_up_proj = MatrixModule(up, MatrixLayout(halves, whole(None, hidden_size)), specs, axis, self.quant)
        inputs = cut_expert(down, None, intermediate_size, what)
        self.down_proj = MatrixModule(down, MatrixLayout((whole(None, hidden_size),), inputs), specs, axis, self.quant)
        self.quant.bind(self, ctx)

    def finalize_weights(self) -> None:
        self.quant.finalize(self)

    def forward(self, x: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None) -> Tensor:
        """See the op fused_experts."""
        return self.quant.apply(self, x, weights, slots, shared)


class MoE(LayerModule):
    """`sum of weight * expert(x) over a token's experts + shared_experts(x)`; x and result `[tokens, hidden]`.

    Named as checkpoints name them: `gate`, `experts`, `shared_experts` (None without `shared_size`). The routed and the
    shared part are added first and summed over the ranks once; `defer`: see `RowParallelLinear`.
    """

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        router: RouterConfig,
        shared_size: int | None = None,
        defer: bool = False,
    ) -> None:
        super().__init__()
        self.parallel, self.ctx_name, self.defer = ctx.parallel, ctx.name, defer
        expert_map = ctx.parallel.expert_map(router.num_experts)
        self.gate = Router(ctx.sub("gate"), hidden_size, router, expert_map)
        self.experts = Experts(ctx.sub("experts"), hidden_size, intermediate_size, expert_map)
        self.shared_experts: GatedMLP | None = None
        if shared_size is not None:
            self.shared_experts = GatedMLP(ctx.sub("shared_experts"), hidden_size, shared_size, defer=True)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor | PartialSum:
        token_mask = None if batch.token_mask is None else batch.match_tokens(batch.token_mask, x)
        weights, slots = self.gate(x, token_mask)
        shared = None if self.shared_experts is None else share(self.shared_experts(x))
        return self.parallel.finish_sum(self.experts(x, weights, slots, shared), self.defer, self.ctx_name)
