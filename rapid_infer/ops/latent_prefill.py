"""Latent attention of a step's tokens to each other, with keys and values of every head (materialised).

A key of 192 features against an entry of 576: for tokens whose keys are made once and used by many, less arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.paged_attention import make_metadata
from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for heads, nope, rope, v, query_lens, context in (
        (2, 16, 8, 16, [9], False),
        (3, 8, 8, 12, [1, 1, 9, 4], True),
        (2, 32, 16, 24, [70, 2, 33], True),
    ):
        metadata, _ = make_metadata([n + 3 for n in query_lens], query_lens, 4, device)
        tokens = sum(query_lens) - query_lens.count(1)
        kwargs = {
            "q_nope": torch.randn(tokens, heads, nope, device=device).to(dtype),
            "q_rope": torch.randn(tokens, heads, rope, device=device).to(dtype),
            "kv": torch.randn(tokens, heads, nope + v, device=device).to(dtype),
            "key": torch.randn(tokens, rope, device=device).to(dtype),
            "metadata": metadata,
            "scale": (nope + rope) ** -0.5,
            "context": torch.randn(tokens, heads, v, device=device).to(dtype) if context else None,
            "context_lse": torch.randn(tokens, heads, device=device) if context else None,
        }
        if context:
            kwargs["context_lse"][:3] = -math.inf
        yield Case(kwargs, {"nope_dim": nope, "rope_dim": rope, "v_dim": v})


@op(inputs=_inputs)
def latent_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    key: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    context: Tensor | None,
    context_lse: Tensor | None,
) -> Tensor:
    """Causal softmax attention, in fp32, among the tokens of each row that has several, and its context's part added.

    T tokens stand after the step's first `num_decodes`:

    q_nope, q_rope  `[T, heads, nope]` and `[T, heads, rope]`, rotated; both may have gaps between heads
    kv              `[T, heads, nope + v]`: each head's key and value
    key             `[T, rope]`, rotated: the rest of the key, for all heads; may have gaps between tokens
    context, context_lse  `[T, heads, v]` and `[T, heads]` fp32: what attention to earlier tokens gave, and the natural
                    log of its denominator, minus infinity where there were none; None: there were none at all
    returns         `[T, heads, v]` in q's dtype
    """
    nope, first = q_nope.shape[-1], metadata.num_decodes
    starts = [start - first for start in metadata.query_start.tolist()[first:]]
    out = torch.empty(*q_nope.shape[:2], kv.shape[-1] - nope, dtype=q_nope.dtype, device=q_nope.device)
    for start, stop in pairwise(starts):
        mine, n = slice(start, stop), stop - start
        keys, values = kv[mine].float().split((nope, out.shape[-1]), dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q_nope[mine].float(), keys)
        scores += torch.einsum("qhd,kd->hqk", q_rope[mine].float(), key[mine].float())
        hidden = torch.ones(n, n, dtype=torch.bool, device=q_nope.device).triu_(1)
        scores = (scores * scale).masked_fill_(hidden, -math.inf)
        total = scores.logsumexp(-1)
        if context_lse is not None:
            total = torch.logaddexp(total, context_lse[mine].t())
        attended = torch.einsum("hqk,khd->qhd", (scores - total.unsqueeze(-1)).exp_(), values)
        if context is not None and context_lse is not None:
            attended += (context_lse[mine] - total.t()).exp().unsqueeze(-1) * context[mine].float()
        out[mine] = attended.to(out.dtype)
    return out
