"""Triton providers, declared by name: Triton and the kernels are imported when a layer first binds one."""

from __future__ import annotations

from rapid_infer.ops import register_lazy
from rapid_infer.ops.providers.triton.facts import PRIORITY, cannot_attend, cannot_keep, unavailable

_HERE = "rapid_infer.ops.providers.triton"

for _op, _module in (
    ("rms_norm", "norm"),
    ("fused_add_rms_norm", "norm"),
    ("silu_and_mul", "activation"),
    ("linear", "linear.linear"),
    ("linear_silu_and_mul", "linear.linear"),
    ("lm_head", "linear.linear"),
    ("lm_head_argmax", "linear.linear"),
    ("truncate_logits", "sampling.truncate"),
    ("gumbel_argmax", "sampling.gumbel_argmax"),
    ("decode_inputs", "step.inputs"),
    ("mixed_inputs", "step.inputs"),
    ("mla_prefill", "mla.prefill"),
    ("router_logits", "experts.router"),
    ("route_experts", "experts.router"),
    ("fused_experts", "experts.fused_experts"),
    ("quantized_linear", "quantized.linear"),
    ("quantized_experts", "quantized.experts"),
    ("dequantize", "quantized.dequantize"),
    ("embedding", "embedding"),
    ("commit_tokens", "step.inputs"),
):
    register_lazy(_op, "triton", f"{_HERE}.{_module}:{_op}", priority=PRIORITY, supports=unavailable)
for _op, _module in (
    ("qk_norm_rope_kv_write", "attention.rope_kv_write"),
    ("mla_decode", "mla.decode"),
    ("mla_context", "mla.context"),
    ("mla_kv_write", "mla.kv_write"),
):
    register_lazy(_op, "triton", f"{_HERE}.{_module}:{_op}", priority=PRIORITY, supports=cannot_keep)
register_lazy(
    "paged_attention",
    "triton",
    f"{_HERE}.attention.paged_attention:paged_attention",
    priority=PRIORITY,
    supports=cannot_attend,
)
