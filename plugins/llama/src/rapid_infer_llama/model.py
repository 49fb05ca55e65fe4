"""Llama: grouped-query attention, RoPE, SwiGLU. Checkpoints that say `LlamaForCausalLM`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rapid_infer.plugin import (
    Attention,
    BuildContext,
    ConfigReader,
    DecoderConfig,
    DecoderModel,
    ForwardBatch,
    GatedMLP,
    QKVParallelLinear,
    RopeConfig,
    RowParallelLinear,
    WeightMap,
    rename,
    stack,
    tie,
)


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, ctx: BuildContext) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            ctx.sub("qkv_proj"), config.hidden_size, heads, kv_heads, dim, bias=config.attention_bias
        )
        self.o_proj = RowParallelLinear(
            ctx.sub("o_proj"), heads * dim, config.hidden_size, config.attention_bias, defer=True
        )
        self.attn = Attention(
            ctx.sub("attn"), self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, dim, rope=config.rope
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x), batch))


class LlamaForCausalLM(DecoderModel):
    weight_map = WeightMap(
        [
            rename("model", "", at_start=True),
            rename("lm_head", "head", at_start=True),
            stack(("q_proj", "k_proj", "v_proj"), "qkv_proj", parts=("q", "k", "v")),
            stack(("gate_proj", "up_proj"), "gate_up_proj"),
            tie("head", "embed_tokens"),
        ]
    )

    @staticmethod
    def read_config(hf_config: Any) -> LlamaConfig:
        read = ConfigReader(hf_config)
        read.expect("hidden_act", "silu", default="silu")
        heads = read.size("num_attention_heads")
        head_dim = read.size("head_dim", read.size("hidden_size") // heads)
        max_positions = read.size("max_position_embeddings")
        rope = RopeConfig.read(read.rope_parameters(), head_dim, max_positions)
        return LlamaConfig(
            vocab_size=read.size("vocab_size"),
            hidden_size=read.size("hidden_size"),
            intermediate_size=read.size("intermediate_size"),
            num_hidden_layers=read.size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=read.size("num_key_value_heads", heads),
            head_dim=head_dim,
            max_position_embeddings=rope.context_length(max_positions),
            rms_norm_eps=read.number("rms_norm_eps"),
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=read.flag("mlp_bias", False),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            rope=rope,
        )

    def attention(self, config: LlamaConfig, ctx: BuildContext, number: int) -> nn.Module:
        return LlamaAttention(config, ctx)

    def feed_forward(self, config: LlamaConfig, ctx: BuildContext, number: int) -> nn.Module:
        return GatedMLP(ctx, config.hidden_size, config.intermediate_size, config.mlp_bias, defer=True)
