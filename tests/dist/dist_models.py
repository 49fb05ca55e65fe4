"""Tiny models of every kind, in sizes that two, three and four ranks can share."""

from __future__ import annotations

from typing import Any

HEADS = {"num_attention_heads": 12, "head_dim": 8, "hidden_size": 96}
MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_attention_heads": 12, "hidden_size": 96}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
GROUPS = {"n_group": 4, "topk_group": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**HEADS, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {**HEADS, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    # Not a multiple of any number of ranks that share them out.
    "qwen3_moe": (
        "qwen3_moe",
        {**HEADS, "num_key_value_heads": 4, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    ),
    "v2_lite": ("deepseek_v2", {**MLA, **EXPERTS, "q_lora_rank": None, "n_shared_experts": 2}),
    "v2": ("deepseek_v2", {**MLA, **EXPERTS, **GROUPS, "q_lora_rank": 24, "topk_method": "group_limited_greedy"}),
    "v3": ("deepseek_v3", {**MLA, **EXPERTS, **GROUPS, "q_lora_rank": 24, "vocab_size": 200}),
}
