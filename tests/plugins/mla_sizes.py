"""Sizes of a tiny DeepSeek-V2 with experts and a rank for queries."""

MLA = {
    "hidden_size": 192, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "q_lora_rank": 96, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
