"""FlashAttention 4, whose kernels are compiled on the first call."""

from __future__ import annotations

from functools import cache

import torch
from flash_attn.cute import flash_attn_varlen_func
from torch import Tensor

from rapid_infer.ops import AttentionMetadata, AttentionParams
from rapid_infer_ops_attention.flash_attn.plan import block_table


@cache
def _num_splits(device: torch.device) -> int:
    """Parts of the keys that are computed apart: 0 lets the library decide, which it cannot do on SM 90."""
    return 1 if torch.cuda.get_device_capability(device)[0] == 9 else 0


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> Tensor | tuple[Tensor, Tensor]:
    out, lse = flash_attn_varlen_func(
        q=q,
        k=k_cache,
        v=v_cache,
        cu_seqlens_q=metadata.query_start,
        max_seqlen_q=metadata.max_query_len,
        max_seqlen_k=metadata.max_seq_len,
        seqused_k=metadata.seq_lens,
        page_table=block_table(metadata),
        softmax_scale=params.scale,
        causal=True,
        window_size=(None, None) if params.window is None else (params.window - 1, 0),
        learnable_sink=params.sinks,
        softcap=params.soft_cap or 0.0,
        num_splits=_num_splits(q.device),
        return_lse=params.return_lse,
    )
    return (out, lse.t().contiguous()) if params.return_lse else out
