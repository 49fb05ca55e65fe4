"""What DeepSeek-V2 and V3 say in config.json. They differ in how a router scores and chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rapid_infer.plugin import ConfigError, ConfigReader, DecoderConfig, MLAConfig, RopeConfig, RouterConfig

GREEDY, GROUPS, BIASED = "greedy", "group_limited_greedy", "noaux_tc"


@dataclass(frozen=True)
class DeepseekConfig(DecoderConfig):
    """A decoder's config, and what DeepSeek adds.

    sparse        per layer, whether its feed-forward part is a mixture of experts
    draft_layers  how many more layers follow those in the checkpoint, for drafting
    """

    intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int | None
    sparse: tuple[bool, ...]
    draft_layers: int
    attention: MLAConfig
    router: RouterConfig


def read_config(hf_config: Any, *, v3: bool) -> DeepseekConfig:
    read = ConfigReader(hf_config)
    read.expect("hidden_act", "silu", default="silu")
    read.expect("attention_bias", False, default=False)
    read.expect("mlp_bias", False, default=False)
    layers, moe_size = read.size("num_hidden_layers"), read.size("moe_intermediate_size")
    first, every = read.integer("first_k_dense_replace", 0), read.size("moe_layer_freq", 1)
    shared = read.integer("n_shared_experts", 0)
    max_positions = read.size("max_position_embeddings")
    attention = _attention(read, max_positions)
    return DeepseekConfig(
        vocab_size=read.size("vocab_size"),
        hidden_size=read.size("hidden_size"),
        intermediate_size=read.size("intermediate_size"),
        moe_intermediate_size=moe_size,
        shared_intermediate_size=shared * moe_size or None,
        num_hidden_layers=layers,
        max_position_embeddings=attention.rope.context_length(max_positions),
        rms_norm_eps=read.number("rms_norm_eps"),
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        sparse=tuple(i >= first and i % every == 0 for i in range(layers)),
        draft_layers=read.integer("num_nextn_predict_layers", 0),
        attention=attention,
        router=_router(read, v3),
    )


def _attention(read: ConfigReader, max_positions: int) -> MLAConfig:
    rope_dim, parameters = read.size("qk_rope_head_dim"), read.rope_parameters()
    # The whole rope part is rotated; `head_dim` and a rotary factor speak of other layouts.
    parameters.pop("partial_rotary_factor", None)
    interleaved = read.flag("rope_interleave", True)
    return MLAConfig(
        hidden_size=read.size("hidden_size"),
        num_attention_heads=read.size("num_attention_heads"),
        q_lora_rank=read.optional_integer("q_lora_rank"),
        kv_lora_rank=read.size("kv_lora_rank"),
        qk_nope_head_dim=read.size("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=read.size("v_head_dim"),
        rope=RopeConfig.read(parameters, rope_dim, max_positions, interleaved),
    )


def _router(read: ConfigReader, v3: bool) -> RouterConfig:
    scoring = read.text("scoring_func", "sigmoid" if v3 else "softmax")
    method = read.text("topk_method", BIASED if v3 else GREEDY)
    allowed = {("softmax", GREEDY), ("softmax", GROUPS), ("sigmoid", BIASED)}
    if (scoring, method) not in allowed:
        listed = ", ".join(f"{s} with {m}" for s, m in sorted(allowed))
        raise ConfigError(
            f"config.json has scoring_func={scoring!r} with topk_method={method!r}, a router that this model does not "
            f"support: expected one of {listed}"
        )
    grouped = method != GREEDY
    return RouterConfig(
        num_experts=read.size("n_routed_experts"),
        top_k=read.size("num_experts_per_tok"),
        scoring=scoring,
        groups=read.size("n_group", 1) if grouped else 1,
        top_groups=read.size("topk_group", 1) if grouped else 1,
        renormalize=read.flag("norm_topk_prob", v3),
        scale=read.number("routed_scaling_factor", 1.0),
        correction_bias=method == BIASED,
    )
