"""DeepSeek-V2 (V2, V2-Lite, Chat) and V3 (V3, R1): multi-head latent attention and a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rapid_infer.plugin import (
    BuildContext,
    ForwardBatch,
    GatedMLP,
    LatentAttention,
    LMHead,
    MoE,
    RMSNorm,
    VocabEmbedding,
    WeightMap,
    experts,
    ignore,
    rename,
    stack,
    tie,
)
from rapid_infer_deepseek_v2.config import DeepseekConfig, read_config


class DeepseekLayer(nn.Module):
    def __init__(self, config: DeepseekConfig, ctx: BuildContext, number: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(ctx.sub("input_layernorm"), size, eps)
        self.self_attn = LatentAttention(ctx.sub("self_attn"), config.attention)
        self.post_attention_layernorm = RMSNorm(ctx.sub("post_attention_layernorm"), size, eps)
        self.mlp: GatedMLP | MoE
        if config.sparse[number]:
            shared = config.shared_intermediate_size
            self.mlp = MoE(ctx.sub("mlp"), size, config.moe_intermediate_size, config.router, shared)
        else:
            self.mlp = GatedMLP(ctx.sub("mlp"), size, config.intermediate_size)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, batch)
        x, residual = self.post_attention_layernorm.add(x, batch.narrow(residual))
        return self.mlp(x, batch), residual


class DeepseekV2ForCausalLM(nn.Module):
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
        super().__init__()
        vocab, size, last = config.vocab_size, config.hidden_size, config.num_hidden_layers
        self.embed_tokens = VocabEmbedding(ctx.sub("embed_tokens"), vocab, size)
        self.layers = ctx.layers(last, lambda ctx, i: DeepseekLayer(config, ctx, i))
        self.norm = RMSNorm(ctx.sub("norm"), size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LMHead(ctx.sub("head"), vocab, size, tied_to=tied_to)
        # Their numbers follow from the config, so this part of the table belongs to the instance.
        why = "multi-token prediction layer: it drafts tokens, and the model's own output does not need it"
        drafts = range(last, last + config.draft_layers)
        self.weight_map = WeightMap([ignore(f"**.layers.{i}.**", why) for i in drafts]) + type(self).weight_map

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids) if batch.inputs_embeds is None else batch.inputs_embeds
        x, residual = self.layers(x, batch)
        return self.norm.add(x, residual)[0]


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    @staticmethod
    def read_config(hf_config: Any) -> DeepseekConfig:
        return read_config(hf_config, v3=True)
