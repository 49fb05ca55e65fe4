"""Norms, activation and RoPE in as few torch calls as possible: each costs about a microsecond, whatever it does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.ops import register
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.cpu.supports import not_on_cpu
from rapid_infer.ops.reference.kv_cache import head_dim, store_heads, write_slots
from rapid_infer.ops.reference.rope_kv_write import qk_norm_rope_kv_write as reference

FEW_ROWS = 8


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    if x.numel() > FEW_ROWS * size:
        # Rounded before the weight is applied, as in the reference; given the weight, torch rounds once, after it.
        return torch.rms_norm(x, (size,), None, eps).mul_(weight)
    # [x, -x] has mean zero, so its layer norm, which is one kernel on a CPU, is the RMS norm of x; torch's own RMS
    # norm is six.
    doubled = torch.layer_norm(torch.cat((x, -x), -1), (2 * size,), None, None, eps, False)
    return doubled.narrow(-1, 0, size).mul_(weight)


@register("rms_norm", "cpu", priority=10, supports=not_on_cpu)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normalize(x, weight, eps)


@register("fused_add_rms_norm", "cpu", priority=10, supports=not_on_cpu)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return _normalize(residual, weight, eps), residual


@register("silu_and_mul", "cpu", priority=10, supports=not_on_cpu)
def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _angles(
    positions: Tensor, cos_sin: Tensor, metadata: AttentionMetadata, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines `[tokens, 1, rotary_dim]` of the step, looked up in its first layer."""
    key = ("cpu rope", id(cos_sin), dtype)
    found = metadata.plans.get(key)
    if found is None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        found = torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
        metadata.plans[key] = found
    return found


@register("qk_norm_rope_kv_write", "cpu", priority=10, supports=not_on_cpu)
def qk_norm_rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    metadata: AttentionMetadata,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    interleaved: bool,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Rotates q and k together: `x * cos + swap(x) * sin`, where swap exchanges the halves of a head."""
    kv_heads, dim = k_cache.shape[-2], head_dim(k_cache)
    one_norm = (q_weight is None) != (k_weight is None)
    if interleaved or one_norm or cos_sin is None or cos_sin.shape[-1] != dim or qkv.dtype == torch.float16:
        return reference(
            qkv, positions, cos_sin, metadata, k_cache, v_cache, q_weight, k_weight, eps, interleaved, kv_scales
        )  # fmt: skip
    tokens, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    qk, v = qkv.view(tokens, -1, dim).split((heads + kv_heads, kv_heads), 1)
    if q_weight is not None and k_weight is not None:
        qk = torch.cat((_normalize(qk[:, :heads], q_weight, eps), _normalize(qk[:, heads:], k_weight, eps)), dim=1)
    cos, sin = _angles(positions, cos_sin, metadata, qkv.dtype)
    q, k = (qk * cos).addcmul_(qk.roll(dim // 2, -1), sin).split((heads, kv_heads), 1)
    if k_cache.dtype == qkv.dtype:
        k_cache.view(-1, kv_heads, dim).index_copy_(0, metadata.slots, k)
        v_cache.view(-1, kv_heads, dim).index_copy_(0, metadata.slots, v)
    else:
        k_scale, v_scale = (None, None) if kv_scales is None else kv_scales
        write_slots(k_cache, metadata.slots, store_heads(k, k_cache.dtype, k_scale))
        write_slots(v_cache, metadata.slots, store_heads(v, v_cache.dtype, v_scale))
    return q
