"""Helpers for testing a model plugin: tiny random checkpoints, transformers as the oracle of what they give, and faults
of a weight map.
"""

from rapid_infer.testing.compare import assert_close, assert_exact, forced_logits, record_logits
from rapid_infer.testing.oracle import GreedyRun, Oracle
from rapid_infer.testing.tiny import TINY, make_checkpoint
from rapid_infer.testing.weight_map_lint import lint_weight_map

__all__ = [
    "TINY",
    "GreedyRun",
    "Oracle",
    "assert_close",
    "assert_exact",
    "forced_logits",
    "lint_weight_map",
    "make_checkpoint",
    "record_logits",
]
