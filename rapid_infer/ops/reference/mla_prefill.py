"""MLA of a step's tokens to each other, with keys and values of every head (materialised).

A key of 192 features against an entry of 576: for tokens whose keys are made once and used by many, less arithmetic.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.registry import op


@op(info=("nope_dim", "rope_dim", "v_dim"), mutates=("out",), capturable=False)
def mla_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    key: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    context_lse: Tensor | None,
) -> None:
    """Causal softmax attention, in fp32, among the tokens of each row that has several, and its context's part added.

    q_nope, q_rope  `[tokens, heads, nope]` and `[tokens, heads, rope]`, rotated; both may have gaps between heads
    kv              `[tokens, heads, nope + v]`: each head's key and value
    key             `[tokens, rope]`, rotated: the rest of the key, for all heads; may have gaps between tokens
    out             `[tokens, heads, v]` in q's dtype, contiguous: what attention to earlier tokens gave becomes the
                    whole; tokens alone in their row are left as they are
    context_lse     `[tokens, heads]` fp32, contiguous: the natural log of that attention's denominator, minus infinity
                    where it gave nothing, and `out` holds anything; None: it gave nothing at all
    """
    nope = q_nope.shape[-1]
    for start, stop in pairwise(metadata.query_start.tolist()):
        mine, n = slice(start, stop), stop - start
        if n < 2:
            continue
        keys, values = kv[mine].float().split((nope, out.shape[-1]), dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q_nope[mine].float(), keys)
        scores += torch.einsum("qhd,kd->hqk", q_rope[mine].float(), key[mine].float())
        hidden = torch.ones(n, n, dtype=torch.bool, device=q_nope.device).triu_(1)
        scores = (scores * scale).masked_fill_(hidden, -math.inf)
        total = scores.logsumexp(-1)
        if context_lse is not None:
            total = torch.logaddexp(total, context_lse[mine].t())
        attended = torch.einsum("hqk,khd->qhd", (scores - total.unsqueeze(-1)).exp_(), values)
        if context_lse is not None:
            share = (context_lse[mine] - total.t()).exp().unsqueeze(-1)
            attended += (share * out[mine].float()).where(share > 0, 0.0)
        out[mine] = attended.to(out.dtype)
