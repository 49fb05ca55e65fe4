"""FlashAttention 2."""

from __future__ import annotations

from flash_attn import flash_attn_varlen_func
from torch import Tensor

from rapid_infer.ops import AttentionMetadata, AttentionParams
from rapid_infer_ops_attention.flash_attn.plan import block_table, key_start


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> Tensor | tuple[Tensor, Tensor]:
    result = flash_attn_varlen_func(
        q=q,
        k=k_cache,
        v=v_cache,
        cu_seqlens_q=metadata.query_start,
        cu_seqlens_k=key_start(metadata),
        max_seqlen_q=metadata.max_query_len,
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=params.scale,
        causal=True,
        window_size=(-1, -1) if params.window is None else (params.window - 1, 0),
        softcap=params.soft_cap or 0.0,
        return_attn_probs=params.return_lse,
        block_table=block_table(metadata),
    )
    if not params.return_lse:
        return result
    # The third is the matrix of probabilities, which is empty without dropout.
    out, lse, _ = result
    return out, lse.t().contiguous()
