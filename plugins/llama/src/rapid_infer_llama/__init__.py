"""Llama models (also SmolLM2 and others of the same shape) for rapid_infer."""
