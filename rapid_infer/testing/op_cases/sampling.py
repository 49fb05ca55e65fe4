"""Cases of truncation and of the draw."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rapid_infer.testing.op_cases.case import Case, cases


@cases
def gumbel_argmax(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, vocab in ((1, 50), (7, 9001)):
        logits = (torch.randn(rows, vocab, device=device) * 4).to(dtype).float()
        logits[:, 3::4] = -math.inf
        if rows > 1:
            logits[4, 17], logits[5, 17], logits[6] = math.nan, math.inf, -math.inf
        row = torch.arange(rows, device=device)
        temperature = torch.where(row % 3 == 1, 0.0, 0.5 + row)
        keys = {"seed": row * 0x7_0000_0001 - 5, "sample_index": row.int(), "position": row + 100}
        yield Case({"logits": logits, "temperature": temperature, **keys})
    yield Case({"logits": logits, "temperature": temperature, **keys, "start": 75_968})


@cases
def truncate_logits(dtype: torch.dtype, device: str) -> Iterator[Case]:
    top_k = torch.tensor([0, 1, 7, 2**31 - 1, 0, 40, 0, 12, 0, 0], dtype=torch.int32, device=device)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.5, 0.7, 1.0, 0.8, 1e-9, 0.0], device=device)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.0, 0.0], device=device)
    for vocab, scale in ((64, 1.0), (3001, 3.0)):
        # As a head of this dtype gives them: in 16 bits many are equal.
        logits = (torch.randn(len(top_k), vocab, device=device) * scale).to(dtype).float()
        logits[:, ::5] = -math.inf
        yield Case({"logits": logits, "top_k": top_k, "top_p": top_p, "min_p": min_p})
        yield Case({"logits": logits, "top_k": top_k, "top_p": top_p, "min_p": None})
        yield Case({"logits": logits, "top_k": None, "top_p": None, "min_p": min_p})
