"""DeepSeek-V2 and V3 for rapid_infer; nothing is imported until a checkpoint asks for it."""
