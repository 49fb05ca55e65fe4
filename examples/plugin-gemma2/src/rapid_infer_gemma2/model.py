"""Gemma2ForCausalLM: norms after attention and feed-forward too, scores and logits that are capped softly, and a
sliding window in every second layer. It imports `rapid_infer.plugin` alone.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import rapid_infer.plugin as ri


@dataclass(frozen=True)
class Config(ri.DecoderConfig):
    """`windows`: per layer, how many tokens attention sees, None for all of them."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    score_cap: float | None
    logit_cap: float | None
    windows: tuple[int | None, ...]
    rope: ri.RopeConfig


class Norm(ri.RMSNorm):
    """Its weights are stored as what is added to one."""

    def finalize_weights(self) -> None:
        self.weight.data += 1


class SelfAttention(nn.Module):
    def __init__(self, config: Config, ctx: ri.BuildContext, number: int) -> None:
        super().__init__()
        size, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.qkv_proj = ri.QKVParallelLinear(ctx.sub("qkv_proj"), size, heads, config.num_key_value_heads, dim)
        self.o_proj = ri.RowParallelLinear(ctx.sub("o_proj"), heads * dim, size)
        self.attn = ri.Attention(
            ctx.sub("attn"),
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            dim,
            rope=config.rope,
            scale=config.scale,
            window=config.windows[number],
            soft_cap=config.score_cap,
        )

    def forward(self, x: Tensor, batch: ri.ForwardBatch) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x), batch))


class GeluMLP(nn.Module):
    def __init__(self, config: Config, ctx: ri.BuildContext) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = ri.MergedColumnParallelLinear(ctx.sub("gate_up_proj"), size, [inner, inner])
        self.down_proj = ri.RowParallelLinear(ctx.sub("down_proj"), inner, size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Layer(nn.Module):
    drops_tokens = True  # attention leaves tokens out of the last layer, and match_tokens follows

    def __init__(self, config: Config, ctx: ri.BuildContext, number: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(ctx.sub("input_layernorm"), size, eps)
        self.post_attention_layernorm = Norm(ctx.sub("post_attention_layernorm"), size, eps)
        self.pre_feedforward_layernorm = Norm(ctx.sub("pre_feedforward_layernorm"), size, eps)
        self.post_feedforward_layernorm = Norm(ctx.sub("post_feedforward_layernorm"), size, eps)
        self.self_attn = SelfAttention(config, ctx.sub("self_attn"), number)
        self.mlp = GeluMLP(config, ctx.sub("mlp"))

    def forward(self, x: Tensor, residual: Tensor | None, batch: ri.ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, batch))
        x, residual = self.pre_feedforward_layernorm.add(x, batch.match_tokens(residual, x))
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma2ForCausalLM(ri.DecoderModel):
    weight_map = ri.WeightMap(
        [
            ri.rename("model", "", at_start=True),
            ri.rename("lm_head", "head", at_start=True),
            ri.stack(("q_proj", "k_proj", "v_proj"), "qkv_proj", parts=("q", "k", "v")),
            ri.stack(("gate_proj", "up_proj"), "gate_up_proj"),
            ri.tie("head", "embed_tokens"),
        ]
    )

    @staticmethod
    def read_config(hf_config: Any) -> Config:
        read = ri.ConfigReader(hf_config)
        read.expect("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
        read.expect("attention_bias", False, default=False)
        read.expect("use_bidirectional_attention", False, default=False)
        layers, longest, head_dim = (
            read.size(name) for name in ("num_hidden_layers", "max_position_embeddings", "head_dim")
        )
        kinds = getattr(hf_config, "layer_types", None)
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ri.ConfigError(f"config.json has layer_types={kinds!r}: expected one for each of {layers} layers")
        window = read.size("sliding_window")
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        return Config(
            **{name: read.size(name) for name in names},
            num_hidden_layers=layers,
            head_dim=head_dim,
            scale=read.size("query_pre_attn_scalar") ** -0.5,
            score_cap=read.number("attn_logit_softcapping", None),
            logit_cap=read.number("final_logit_softcapping", None),
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
            max_position_embeddings=longest,
            rms_norm_eps=read.number("rms_norm_eps"),
            tie_word_embeddings=read.flag("tie_word_embeddings", True),
            rope=ri.RopeConfig.read(read.rope_parameters(), head_dim, longest),
        )

    def __init__(self, config: Config, ctx: ri.BuildContext) -> None:
        super().__init__(config, ctx)
        self.embed_scale = config.hidden_size**0.5
        if isinstance(self.head, ri.LMHead):  # not in a pipeline stage before the last
            self.norm = Norm(ctx.sub("norm"), config.hidden_size, config.rms_norm_eps)
            self.head.soft_cap = config.logit_cap

    def layer(self, config: Config, ctx: ri.BuildContext, number: int) -> nn.Module:
        return Layer(config, ctx, number)

    def embed(self, batch: ri.ForwardBatch) -> Tensor:
        return super().embed(batch) * self.embed_scale
