"""Llama: grouped-query attention, RoPE, SwiGLU. Checkpoints that say `LlamaForCausalLM`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rapid_infer.plugin import (
    Attention,
    BuildContext,
    ConfigReader,
    ForwardBatch,
    GatedMLP,
    LMHead,
    QKVParallelLinear,
    RMSNorm,
    RopeConfig,
    RowParallelLinear,
    VocabEmbedding,
    WeightMap,
    rename,
    stack,
    tie,
)


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: RopeConfig


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, ctx: BuildContext) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            ctx.sub("qkv_proj"), config.hidden_size, heads, kv_heads, dim, bias=config.attention_bias
        )
        self.o_proj = RowParallelLinear(ctx.sub("o_proj"), heads * dim, config.hidden_size, config.attention_bias)
        self.attn = Attention(
            ctx.sub("attn"), self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, dim, rope=config.rope
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return self.o_proj(batch.narrow(self.attn(self.qkv_proj(x), batch)))


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig, ctx: BuildContext) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(ctx.sub("input_layernorm"), size, eps)
        self.self_attn = LlamaAttention(config, ctx.sub("self_attn"))
        self.post_attention_layernorm = RMSNorm(ctx.sub("post_attention_layernorm"), size, eps)
        self.mlp = GatedMLP(ctx.sub("mlp"), size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, batch)
        x, residual = self.post_attention_layernorm.add(x, batch.narrow(residual))
        return self.mlp(x), residual


class LlamaForCausalLM(nn.Module):
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

    def __init__(self, config: LlamaConfig, ctx: BuildContext) -> None:
        super().__init__()
        vocab, size = config.vocab_size, config.hidden_size
        self.embed_tokens = VocabEmbedding(ctx.sub("embed_tokens"), vocab, size)
        self.layers = ctx.layers(config.num_hidden_layers, lambda ctx, i: LlamaLayer(config, ctx))
        self.norm = RMSNorm(ctx.sub("norm"), size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LMHead(ctx.sub("head"), vocab, size, tied_to=tied_to)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids) if batch.inputs_embeds is None else batch.inputs_embeds
        x, residual = self.layers(x, batch)
        return self.norm.add(x, residual)[0]
