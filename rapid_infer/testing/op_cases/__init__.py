"""Test cases of this package's operators, and what runs those of any operator: `cases_of` and `check`."""

from rapid_infer.testing.op_cases import attention, experts, linear, mla, pointwise, quantized, sampling, step
from rapid_infer.testing.op_cases.case import TOLERANCE, Case, cases_of, check

__all__ = [
    "TOLERANCE",
    "Case",
    "attention",
    "cases_of",
    "check",
    "experts",
    "linear",
    "mla",
    "pointwise",
    "quantized",
    "sampling",
    "step",
]
