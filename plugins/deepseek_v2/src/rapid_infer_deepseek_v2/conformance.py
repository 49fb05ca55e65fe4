"""Tiny sizes for `rapid-infer plugin check rapid-infer-deepseek-v2`, and variants that must be exact too."""

from __future__ import annotations

from typing import Any


def yarn(mscale: float | None, mscale_all_dim: float | None) -> dict[str, Any]:
    """An original length of 64: YaRN's factors and ramp show at positions that a short test reaches."""
    given = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        **{name: value for name, value in given.items() if value is not None},
    }


MLA = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": yarn(0.707, 0.707),
}
LITE = {**MLA, "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "topk_method": "greedy"}
# Five experts a token from two groups: without the limit nearly every token would take them from three or four.
V2 = {
    **MLA,
    "q_lora_rank": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 5,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 3.0,
}
V3 = {
    **MLA,
    "q_lora_rank": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": yarn(1.0, 1.0),
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CASES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        "model_type": "deepseek_v2",
        "sizes": V2,
        "variants": {
            "lite": LITE,
            "lite-plain-rope": {**LITE, "rope_parameters": PLAIN_ROPE},
            "lite-scaled": {**LITE, "routed_scaling_factor": 2.0},
            "lite-all-sparse": {**LITE, "first_k_dense_replace": 0, "vocab_size": 97},
            "lite-tied-one-expert": {**LITE, "num_experts_per_tok": 1, "tie_word_embeddings": True},
            "mscale-differs": {"rope_parameters": yarn(1.0, 0.5)},
            "no-mscale": {"rope_parameters": yarn(None, None)},
        },
        "refuses": [{"topk_method": "thresholds"}, {"attention_bias": True}],
    },
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3",
        "sizes": V3,
        "variants": {
            "not-renormalized": {"norm_topk_prob": False},
            "no-query-latent": {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
            "halves": {"rope_interleave": False},
        },
        "refuses": [{"scoring_func": "tanh"}, {"topk_method": "greedy"}],
    },
}
