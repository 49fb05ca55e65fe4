"""FlashAttention 3 as vLLM builds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func

from rapid_infer.ops import AttentionMetadata, AttentionParams
from rapid_infer_ops_attention.flash_attn.plan import block_table


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
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
        softmax_scale=params.scale,
        causal=True,
        window_size=None if params.window is None else [params.window - 1, 0],
        softcap=params.soft_cap or 0.0,
        # It takes sinks in bfloat16 only, whatever q's dtype.
        s_aux=None if params.sinks is None else params.sinks.to(torch.bfloat16),
        return_softmax_lse=params.return_lse,
        fa_version=3,
    )
    if not params.return_lse:
        return result
    out, lse = result
    return out, lse.t().contiguous()
