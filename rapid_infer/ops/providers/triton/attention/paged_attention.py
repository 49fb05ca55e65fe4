"""Paged attention in two kernels: rows with one token, and rows with more."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.ops.providers.triton.attention.decode import decode
from rapid_infer.ops.providers.triton.attention.prefill import prefill
from rapid_infer.ops.providers.triton.attention.tile import score_scales, tile_constants


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reads no tensor on the host, so it can be captured in a CUDA graph; a token without keys gets zeros."""
    if k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError(
            "keys and values must have the same strides, 1 along head_dim, "
            f"got {k_cache.stride()} and {v_cache.stride()}"
        )
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if params.return_lse else None
    scales, constants = score_scales(params.scale, params.soft_cap), tile_constants(q, k_cache)
    if k_cache.dtype.itemsize == 1 and q.dtype.itemsize == 2 and k_cache.shape[-1] % 2 == 0:
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    layer = params.window, params.sinks, params.kv_scales
    if metadata.num_decodes:
        decode(q, k_cache, v_cache, out, lse, metadata, *layer, scales, constants)
    # Only the device may know which rows have one token; then neither part can be left out.
    if metadata.decodes is not None or q.shape[0] > metadata.num_decodes:
        prefill(q, k_cache, v_cache, out, lse, metadata, *layer, scales, constants)
    return out if lse is None else (out, lse)
