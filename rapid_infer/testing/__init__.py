"""Helpers for testing a model plugin: tiny random checkpoints, and transformers as the oracle of what they must give."""

from rapid_infer.testing.oracle import GreedyRun, Oracle, record_logits
from rapid_infer.testing.tiny import TINY, make_checkpoint

__all__ = ["TINY", "GreedyRun", "Oracle", "make_checkpoint", "record_logits"]
