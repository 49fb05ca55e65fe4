"""Latent attention in two kernels: rows with one token, and rows with more."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.latent_decode import decode
from rapid_infer.ops.providers.triton.latent_prefill import prefill


def latent_attention(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, rank: int) -> Tensor:
    """Reads no tensor on the host, so it can be captured in a CUDA graph; a token without keys gets zeros."""
    if cache.stride(-1) != 1:
        raise ValueError(f"a cached entry's features must lie side by side, got strides {cache.stride()}")
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    if metadata.num_decodes:
        decode(q, cache, out, metadata, scale, rank)
    if q.shape[0] > metadata.num_decodes:
        prefill(q, cache, out, metadata, scale, rank)
    return out
