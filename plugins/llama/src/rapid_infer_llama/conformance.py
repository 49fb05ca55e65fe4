"""Tiny sizes for `rapid-infer plugin check rapid-infer-llama`, and variants that must be exact too."""

from __future__ import annotations

from typing import Any

# An original length of 64 puts the few frequencies of a small head on both sides of each formula's limits and between.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_ALL = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}
YARN_MSCALE = {**YARN, "mscale": 0.9, "mscale_all_dim": 0.6}

CASES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "model_type": "llama",
        "variants": {
            "tied": {"tie_word_embeddings": True},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "no-groups": {"num_key_value_heads": 4},
            "one-kv-head": {"num_key_value_heads": 1, "vocab_size": 101},
            "wide-heads": {"head_dim": 24, "vocab_size": 257},
            "theta-eps": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rms_norm_eps": 0.1},
            "rope-llama3": {"rope_parameters": LLAMA3},
            "rope-linear": {"rope_parameters": LINEAR},
            "rope-yarn": {"rope_parameters": YARN},
            "rope-yarn-all": {"rope_parameters": YARN_ALL},
            "rope-yarn-mscale": {"rope_parameters": YARN_MSCALE},
        },
    },
}
