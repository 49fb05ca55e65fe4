"""The draw of one token per row, by the argmax of noisy logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops import noise
from rapid_infer.ops.registry import Case, op


def _inputs(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, vocab in ((1, 50), (7, 9001)):
        logits = (torch.randn(rows, vocab, device=device) * 4).to(dtype).float()
        logits[:, 3::4] = -math.inf
        if rows > 1:
            logits[4, 17], logits[5, 17], logits[6] = math.nan, math.inf, -math.inf
        row = torch.arange(rows, device=device)
        temperature = torch.where(row % 3 == 1, 0.0, 0.5 + row)
        keys = {"seed": row * 0x7_0000_0001 - 5, "sample_index": row.int(), "position": row + 100}
        yield Case({"logits": logits, "temperature": temperature, **keys})


@op(inputs=_inputs)
def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seed: Tensor, sample_index: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """A draw from `softmax(logits / temperature)`: the argmax of it plus `noise.gumbel`; at temperature 0 the argmax.

    logits fp32 `[n, vocab]`; temperature fp32, seed int64, sample_index and position integer, all `[n]`. Returns
    (token int64 `[n]`, failed bool `[n]`). Among equals the lower id. A failed row had NaN, or no finite maximum; its
    token is 0, so that it can be looked up safely.
    """
    best, token = logits.max(dim=-1)
    failed = ~torch.isfinite(best)
    greedy = temperature == 0
    scaled = logits / temperature.where(~greedy, 1.0).unsqueeze(1)
    noisy = scaled + noise.gumbel(seed, sample_index, position, logits.shape[1])
    token = token.where(greedy, noisy.argmax(dim=-1))
    return token.where(~failed, 0), failed
