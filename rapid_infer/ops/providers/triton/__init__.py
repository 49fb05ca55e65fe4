"""Triton providers, declared by name: Triton and the kernels are imported when a layer first binds one."""

from __future__ import annotations

from rapid_infer.ops.providers.triton.facts import PRIORITY, unavailable
from rapid_infer.ops.registry import register_lazy

_HERE = "rapid_infer.ops.providers.triton"

for _op, _module in (
    ("rms_norm", "norm"),
    ("fused_add_rms_norm", "norm"),
    ("silu_and_mul", "activation"),
    ("qk_norm_rope_kv_write", "rope_kv_write"),
):
    register_lazy(_op, "triton", f"{_HERE}.{_module}:{_op}", priority=PRIORITY, supports=unavailable)
