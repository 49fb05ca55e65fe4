"""Qwen2 (biases on q, k, v) and Qwen3 (RMSNorm on each head of q and k): one file, since that is all they differ in."""

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
    RMSNorm,
    RopeConfig,
    RowParallelLinear,
    WeightMap,
    rename,
    stack,
    tie,
)


@dataclass(frozen=True)
class QwenConfig(DecoderConfig):
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig


def _read_windows(hf_config: Any, read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Per layer, the sliding window or None, if the config uses windows at all.

    `layer_types` decides; a config without it has windows in the layers from `max_window_layers` on.
    """
    if not read.flag("use_sliding_window", False):
        return (None,) * layers
    window, first = read.optional_integer("sliding_window"), read.integer("max_window_layers", layers)
    kinds = getattr(hf_config, "layer_types", None)
    slides = [i >= first for i in range(layers)] if kinds is None else [kind == "sliding_attention" for kind in kinds]
    return tuple(window if yes else None for yes in slides)


def read_fields(hf_config: Any, *, qwen3: bool) -> QwenConfig:
    read = ConfigReader(hf_config)
    read.expect("hidden_act", "silu", default="silu")
    heads, layers = read.size("num_attention_heads"), read.size("num_hidden_layers")
    head_dim = read.size("head_dim", read.size("hidden_size") // heads)
    max_positions = read.size("max_position_embeddings")
    rope = RopeConfig.read(read.rope_parameters(), head_dim, max_positions)
    bias = read.flag("attention_bias", False)
    return QwenConfig(
        vocab_size=read.size("vocab_size"),
        hidden_size=read.size("hidden_size"),
        intermediate_size=read.size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=read.size("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=rope.context_length(max_positions),
        rms_norm_eps=read.number("rms_norm_eps"),
        qkv_bias=bias if qwen3 else True,
        o_bias=bias if qwen3 else False,
        qk_norm=qwen3,
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        windows=_read_windows(hf_config, read, layers),
        rope=rope,
    )


class QwenAttention(nn.Module):
    def __init__(self, config: QwenConfig, ctx: BuildContext, window: int | None) -> None:
        super().__init__()
        size, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(ctx.sub("qkv_proj"), size, heads, kv_heads, dim, config.qkv_bias)
        self.o_proj = RowParallelLinear(ctx.sub("o_proj"), heads * dim, size, config.o_bias, defer=True)
        self.q_norm = RMSNorm(ctx.sub("q_norm"), dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(ctx.sub("k_norm"), dim, config.rms_norm_eps) if config.qk_norm else None
        self.attn = Attention(
            ctx.sub("attn"),
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            dim,
            rope=config.rope,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            window=window,
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x), batch))


class Qwen3ForCausalLM(DecoderModel):
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
    def read_config(hf_config: Any) -> QwenConfig:
        return read_fields(hf_config, qwen3=True)

    def attention(self, config: QwenConfig, ctx: BuildContext, number: int) -> nn.Module:
        return QwenAttention(config, ctx, config.windows[number])

    def feed_forward(self, config: QwenConfig, ctx: BuildContext, number: int) -> nn.Module:
        return GatedMLP(ctx, config.hidden_size, config.intermediate_size, defer=True)


class Qwen2ForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def read_config(hf_config: Any) -> QwenConfig:
        return read_fields(hf_config, qwen3=False)
