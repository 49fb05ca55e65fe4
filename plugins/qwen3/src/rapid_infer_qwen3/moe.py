"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the feed-forward part of most layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from rapid_infer.plugin import BuildContext, ConfigReader, MoE, RouterConfig, WeightMap, experts
from rapid_infer_qwen3.model import Qwen3ForCausalLM, QwenConfig, read_fields


@dataclass(frozen=True)
class Qwen3MoeConfig(QwenConfig):
    """`sparse`: per layer, whether it has experts."""

    moe_intermediate_size: int
    sparse: tuple[bool, ...]
    router: RouterConfig


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    weight_map = (
        WeightMap([experts(("gate_proj", "up_proj"), "gate_up_proj"), experts("down_proj", "down_proj")])
        + Qwen3ForCausalLM.weight_map
    )

    @staticmethod
    def read_config(hf_config: Any) -> Qwen3MoeConfig:
        read = ConfigReader(hf_config)
        # Which layers a window is for is spelled in several ways, and no published checkpoint has one.
        read.expect("use_sliding_window", False, default=False)
        step, dense = read.size("decoder_sparse_step", 1), getattr(hf_config, "mlp_only_layers", None) or ()
        return Qwen3MoeConfig(
            **vars(read_fields(hf_config, qwen3=True)),
            moe_intermediate_size=read.size("moe_intermediate_size"),
            sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(read.size("num_hidden_layers"))),
            router=RouterConfig(
                num_experts=read.size("num_experts"),
                top_k=read.size("num_experts_per_tok"),
                renormalize=read.flag("norm_topk_prob", False),
            ),
        )

    def feed_forward(self, config: QwenConfig, ctx: BuildContext, number: int) -> nn.Module:
        assert isinstance(config, Qwen3MoeConfig)
        if not config.sparse[number]:
            return super().feed_forward(config, ctx, number)
        return MoE(ctx, config.hidden_size, config.moe_intermediate_size, config.router, defer=True)
