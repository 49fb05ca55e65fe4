"""Which package to suggest for what no installed one provides. Hints for messages, nothing more."""

KNOWN_PLUGINS: dict[str, str] = {
    "LlamaForCausalLM": "rapid-infer-llama",
    "Qwen2ForCausalLM": "rapid-infer-qwen3",
    "Qwen3ForCausalLM": "rapid-infer-qwen3",
    "Qwen3MoeForCausalLM": "rapid-infer-qwen3",
    "DeepseekV2ForCausalLM": "rapid-infer-deepseek-v2",
    "DeepseekV3ForCausalLM": "rapid-infer-deepseek-v2",
}
"""By architecture."""

KNOWN_PROVIDERS: dict[str, str] = dict.fromkeys(
    ("vllm_flash_attn", "flash_attn_4", "flash_attn", "flashinfer"), "rapid-infer-ops-attention"
)
"""By provider of an operator."""
