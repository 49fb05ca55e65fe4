"""FlashAttention 3 as vLLM builds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.flash_attn.plan import block_table


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The library decides on the device, row by row, into how many parts to split the keys."""
    result: Any = flash_attn_varlen_func(
        q=q,
        k=k_cache,
        v=v_cache,
        max_seqlen_q=metadata.max_query_len,
        cu_seqlens_q=metadata.query_start,
        max_seqlen_k=metadata.max_seq_len,
        seqused_k=metadata.seq_lens,
        block_table=block_table(metadata),
        softmax_scale=scale,
        causal=True,
        window_size=None if window is None else [window - 1, 0],
        softcap=soft_cap or 0.0,
        # It takes sinks in bfloat16 only, whatever q's dtype.
        s_aux=None if sinks is None else sinks.to(torch.bfloat16),
        return_softmax_lse=return_lse,
        fa_version=3,
    )
    if not return_lse:
        return result
    out, lse = result
    return out, lse.t().contiguous()
