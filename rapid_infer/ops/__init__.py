"""Operators: one file per op (signature, meaning, torch reference), and providers that do the same faster.

A provider is picked when a layer is built (`Op.bind`). This is what packages of the group `rapid_infer.ops` import.
"""

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams, lacks
from rapid_infer.ops.embedding import embedding
from rapid_infer.ops.fused_experts import fused_experts
from rapid_infer.ops.gumbel_argmax import gumbel_argmax
from rapid_infer.ops.linear import linear
from rapid_infer.ops.linear_silu_and_mul import linear_silu_and_mul
from rapid_infer.ops.lm_head import lm_head, lm_head_argmax
from rapid_infer.ops.mla_attention import mla_context, mla_decode
from rapid_infer.ops.mla_kv_write import mla_kv_write
from rapid_infer.ops.mla_prefill import mla_prefill
from rapid_infer.ops.paged_attention import paged_attention
from rapid_infer.ops.registry import OPS, BoundOp, Op, OpInfo, OpResolver, load_providers, op, register, register_lazy
from rapid_infer.ops.rms_norm import fused_add_rms_norm, rms_norm
from rapid_infer.ops.rope_kv_write import qk_norm_rope_kv_write
from rapid_infer.ops.route_experts import route_experts
from rapid_infer.ops.router_logits import router_logits
from rapid_infer.ops.silu_and_mul import silu_and_mul
from rapid_infer.ops.step_inputs import commit_tokens, decode_inputs, mixed_inputs
from rapid_infer.ops.truncate_logits import truncate_logits

__all__ = [
    "OPS",
    "AttentionMetadata",
    "AttentionParams",
    "BoundOp",
    "Op",
    "OpInfo",
    "OpResolver",
    "commit_tokens",
    "decode_inputs",
    "embedding",
    "fused_add_rms_norm",
    "fused_experts",
    "gumbel_argmax",
    "lacks",
    "linear",
    "linear_silu_and_mul",
    "lm_head",
    "lm_head_argmax",
    "load_providers",
    "mixed_inputs",
    "mla_context",
    "mla_decode",
    "mla_kv_write",
    "mla_prefill",
    "op",
    "paged_attention",
    "qk_norm_rope_kv_write",
    "register",
    "register_lazy",
    "rms_norm",
    "route_experts",
    "router_logits",
    "silu_and_mul",
    "truncate_logits",
]
