"""Helpers for testing a model plugin: tiny random checkpoints, and transformers as the oracle of what they give."""

from rapid_infer.testing.compare import assert_close, assert_exact, forced_logits, record_logits
from rapid_infer.testing.oracle import GreedyRun, Oracle
from rapid_infer.testing.tiny import TINY, make_checkpoint

__all__ = [
    "TINY",
    "GreedyRun",
    "Oracle",
    "assert_close",
    "assert_exact",
    "forced_logits",
    "make_checkpoint",
    "record_logits",
]
