"""Triton providers, declared by name: Triton and the kernels are imported when a layer first binds one."""

from __future__ import annotations

from rapid_infer.ops.providers.triton.facts import PRIORITY, cannot_attend, unavailable
from rapid_infer.ops.registry import register_lazy

_HERE = "rapid_infer.ops.providers.triton"

for _op, _module in (
    ("rms_norm", "norm"),
    ("fused_add_rms_norm", "norm"),
    ("silu_and_mul", "activation"),
    ("linear", "linear"),
    ("linear_silu_and_mul", "linear"),
    ("lm_head", "linear"),
    ("lm_head_argmax", "linear"),
    ("qk_norm_rope_kv_write", "rope_kv_write"),
    ("truncate_logits", "truncate"),
    ("gumbel_argmax", "sampling"),
    ("decode_inputs", "step_inputs"),
    ("mixed_inputs", "step_inputs"),
    ("latent_decode", "latent_decode"),
    ("latent_context", "latent_context"),
    ("latent_prefill", "latent_prefill"),
    ("latent_kv_write", "latent_kv_write"),
    ("router_logits", "router"),
    ("route_experts", "router"),
    ("fused_experts", "experts"),
    ("embedding", "embedding"),
    ("commit_tokens", "step_inputs"),
):
    register_lazy(_op, "triton", f"{_HERE}.{_module}:{_op}", priority=PRIORITY, supports=unavailable)
register_lazy(
    "paged_attention", "triton", f"{_HERE}.attention:paged_attention", priority=PRIORITY, supports=cannot_attend
)
