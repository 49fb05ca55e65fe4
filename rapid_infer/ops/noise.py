"""Counter-based noise: a pure function of (seed, sample index, position, purpose, vocabulary id).

Every rank computes the same noise without a broadcast, a row's noise does not depend on its neighbours, and a step that
runs again draws the same. The mixer is MurmurHash3's 32-bit finalizer (Appleby, public domain), twice per element under
a 64-bit row key. Kernels compute the same bits (`providers/triton/sampling/gumbel_argmax.py`).
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


LOW_KEY, HIGH_KEY = 0x243F6A88, 0x13198A2E
"""Where the two halves of a row key start."""


class Purpose(IntEnum):
    """Keeps apart draws that share seed, sample and position."""

    SAMPLE = 0


def _mix(x: Tensor) -> Tensor:
    """Bijective on 32-bit values held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B).bitwise_and_(_MASK)
    x ^= x >> 13
    x = x.mul_(0xC2B2AE35).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


def _row_key(seed: Tensor, sample_index: Tensor, position: Tensor, purpose: int, start: int) -> Tensor:
    words = (seed & _MASK, (seed >> 32) & _MASK, sample_index.long(), position.long() & _MASK)
    key = torch.full_like(seed, start ^ purpose)
    for word in words:
        key = (_mix(key ^ word) * 5 + 0x9E3779B1) & _MASK
    return key


def uniform(
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    size: int,
    start: int = 0,
    purpose: Purpose = Purpose.SAMPLE,
) -> Tensor:
    """fp32 `[rows, size]` in the open interval (0, 1), for the ids from `start` on. seed int64, sample_index and
    position integer, all `[rows]`.
    """
    low = _row_key(seed, sample_index, position, purpose, LOW_KEY).unsqueeze(1)
    high = _row_key(seed, sample_index, position, purpose, HIGH_KEY).unsqueeze(1)
    ids = torch.arange(start, start + size, device=seed.device)
    bits = _mix(_mix((ids + low) & _MASK) ^ high)
    # 23 bits and a half: the largest value stays below 1 in fp32, where 24 bits would round to it.
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def gumbel(seed: Tensor, sample_index: Tensor, position: Tensor, size: int, start: int = 0) -> Tensor:
    """Standard Gumbel noise fp32 `[rows, size]`: the argmax of logits plus this is a draw from their softmax."""
    return -torch.log(-torch.log(uniform(seed, sample_index, position, size, start)))
