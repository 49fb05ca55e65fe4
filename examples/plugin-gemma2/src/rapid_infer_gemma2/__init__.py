"""Gemma2ForCausalLM for rapid_infer."""
