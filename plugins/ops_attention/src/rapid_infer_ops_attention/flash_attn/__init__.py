"""FlashAttention, versions 2 to 4."""
