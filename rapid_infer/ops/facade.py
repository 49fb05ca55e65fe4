"""What `rapid_infer.ops` offers. Importing this defines all operators of this package."""

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams, lacks
from rapid_infer.ops.quantized import QuantizedMatrix, pack_int4, unpack_int4
from rapid_infer.ops.reference.dequantize import dequantize
from rapid_infer.ops.reference.embedding import embedding
from rapid_infer.ops.reference.fused_experts import fused_experts
from rapid_infer.ops.reference.gumbel_argmax import gumbel_argmax
from rapid_infer.ops.reference.linear import linear
from rapid_infer.ops.reference.linear_silu_and_mul import linear_silu_and_mul
from rapid_infer.ops.reference.lm_head import lm_head, lm_head_argmax
from rapid_infer.ops.reference.mla_attention import mla_context, mla_decode
from rapid_infer.ops.reference.mla_kv_write import mla_kv_write
from rapid_infer.ops.reference.mla_prefill import mla_prefill
from rapid_infer.ops.reference.paged_attention import paged_attention
from rapid_infer.ops.reference.quantized_experts import quantized_experts
from rapid_infer.ops.reference.quantized_linear import quantized_linear
from rapid_infer.ops.reference.rms_norm import fused_add_rms_norm, rms_norm
from rapid_infer.ops.reference.rope_kv_write import qk_norm_rope_kv_write
from rapid_infer.ops.reference.route_experts import route_experts
from rapid_infer.ops.reference.router_logits import router_logits
from rapid_infer.ops.reference.silu_and_mul import silu_and_mul
from rapid_infer.ops.reference.truncate_logits import truncate_logits
from rapid_infer.ops.registry import OPS, BoundOp, Op, OpInfo, OpResolver, load_providers, op, register, register_lazy
from rapid_infer.ops.step_inputs import commit_tokens, decode_inputs, mixed_inputs

__all__ = [
    "OPS",
    "AttentionMetadata",
    "AttentionParams",
    "BoundOp",
    "Op",
    "OpInfo",
    "OpResolver",
    "QuantizedMatrix",
    "commit_tokens",
    "decode_inputs",
    "dequantize",
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
    "pack_int4",
    "paged_attention",
    "qk_norm_rope_kv_write",
    "quantized_experts",
    "quantized_linear",
    "register",
    "register_lazy",
    "rms_norm",
    "route_experts",
    "router_logits",
    "silu_and_mul",
    "truncate_logits",
    "unpack_int4",
]
