"""CPU providers. At one token a step the references spend most of their time in calls, not in arithmetic."""

from rapid_infer.ops.providers.cpu import attention, experts, linear, mla, pointwise, step_inputs

__all__ = ["attention", "experts", "linear", "mla", "pointwise", "step_inputs"]
