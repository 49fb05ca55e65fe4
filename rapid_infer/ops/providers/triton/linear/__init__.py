"""Products of tokens and a weight."""
