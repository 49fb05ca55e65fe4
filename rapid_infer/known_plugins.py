"""Which package to suggest for an architecture that no installed plugin provides. A hint for messages, nothing more."""

KNOWN_PLUGINS: dict[str, str] = {
    "LlamaForCausalLM": "rapid-infer-llama",
    "Qwen2ForCausalLM": "rapid-infer-qwen3",
    "Qwen3ForCausalLM": "rapid-infer-qwen3",
    "Qwen3MoeForCausalLM": "rapid-infer-qwen3",
    "DeepseekV2ForCausalLM": "rapid-infer-deepseek-v2",
    "DeepseekV3ForCausalLM": "rapid-infer-deepseek-v2",
}
