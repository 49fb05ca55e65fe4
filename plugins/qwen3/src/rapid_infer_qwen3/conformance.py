"""Tiny sizes for `rapid-infer plugin check rapid-infer-qwen3`, and variants that must be exact too."""

from __future__ import annotations

from typing import Any

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}

CASES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "sizes": {**WINDOWS, "max_window_layers": 2},
        "variants": {
            "whole": {"use_sliding_window": False},
            "tied": {"use_sliding_window": False, "tie_word_embeddings": True, "num_key_value_heads": 1},
            "rope-yarn": {"use_sliding_window": False, "rope_parameters": YARN, "num_attention_heads": 8},
        },
        "ranks": (2,),
    },
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "sizes": {"head_dim": 32, "tie_word_embeddings": True},
        "variants": {
            "untied": {"head_dim": 16, "tie_word_embeddings": False},
            "narrow-heads": {"head_dim": 8, "num_key_value_heads": 4, "vocab_size": 131},
            "biases": {"attention_bias": True, "num_key_value_heads": 1},
            "rope-yarn": {"rope_parameters": YARN},
            "windows": {**WINDOWS, "max_window_layers": 1},
            "all-windows": {**WINDOWS, "max_window_layers": 0},
            "windows-off": {**WINDOWS, "max_window_layers": 1, "use_sliding_window": False},
            "layer-types": {**WINDOWS, "max_window_layers": 3, "layer_types": MIXED},
        },
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "sizes": {"head_dim": 32, "num_hidden_layers": 3, **EXPERTS},
        "variants": {
            "not-renormalized": {"norm_topk_prob": False},
            "every-second": {"decoder_sparse_step": 2},
            "first-dense": {"mlp_only_layers": [0, 2]},
        },
        "refuses": [{"use_sliding_window": True, "sliding_window": 8}],
    },
}
