"""DeepSeek-V2 (V2, V2-Lite, Chat) and V3 (V3, R1): multi-head latent attention and a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from rapid_infer.plugin import (
    BuildContext,
    DecoderModel,
    GatedMLP,
    MLAAttention,
    MoE,
    WeightMap,
    experts,
    ignore,
    rename,
    stack,
    tie,
)
from rapid_infer_deepseek_v2.config import DeepseekConfig, read_config


class DeepseekV2ForCausalLM(DecoderModel):
    weight_map = WeightMap(
        [
            rename("model", "", at_start=True),
            rename("lm_head", "head", at_start=True),
            stack(("q_proj", "q_a_proj", "kv_a_proj_with_mqa"), "qkv_a_proj", parts=("q", "q_a", "kv_a")),
            experts(("gate_proj", "up_proj"), "gate_up_proj"),
            experts("down_proj", "down_proj"),
            stack(("gate_proj", "up_proj"), "gate_up_proj"),
            tie("head", "embed_tokens"),
        ]
    )

    @staticmethod
    def read_config(hf_config: Any) -> DeepseekConfig:
        return read_config(hf_config, v3=False)

    def __init__(self, config: DeepseekConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        # Their numbers follow from the config, so this part of the table belongs to the instance.
        why = "multi-token prediction layer: it drafts tokens, and the model's own output does not need it"
        drafts = range(config.num_hidden_layers, config.num_hidden_layers + config.draft_layers)
        self.weight_map = WeightMap([ignore(f"**.layers.{i}.**", why) for i in drafts]) + type(self).weight_map

    def attention(self, config: DeepseekConfig, ctx: BuildContext, number: int) -> nn.Module:
        return MLAAttention(ctx, config.attention, defer=True)

    def feed_forward(self, config: DeepseekConfig, ctx: BuildContext, number: int) -> nn.Module:
        if not config.sparse[number]:
            return GatedMLP(ctx, config.hidden_size, config.intermediate_size, defer=True)
        shared = config.shared_intermediate_size
        return MoE(ctx, config.hidden_size, config.moe_intermediate_size, config.router, shared, defer=True)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    @staticmethod
    def read_config(hf_config: Any) -> DeepseekConfig:
        return read_config(hf_config, v3=True)
