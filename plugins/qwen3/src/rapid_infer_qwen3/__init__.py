"""Qwen2, Qwen2.5 and Qwen3 models for rapid_infer."""
