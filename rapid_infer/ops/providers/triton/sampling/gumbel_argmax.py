"""The noisy argmax in two stages: parts of a row in parallel, then the best of its parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops import noise
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options, start_next, wait_previous

BLOCK = 2048
LOW_KEY, HIGH_KEY = (tl.constexpr(start ^ noise.Purpose.SAMPLE) for start in (noise.LOW_KEY, noise.HIGH_KEY))
# Noise is at most -log(-log(1 - 2^-24)) = 16.64.
MOST_NOISE = tl.constexpr(17.0)
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _absorb(key, word):
    return _mix(key ^ word) * 5 + 0x9E3779B1


@triton.jit
def _row_key(start, seed, sample_index, position):
    key = _absorb(start, seed.to(tl.uint32))
    key = _absorb(key, (seed >> 32).to(tl.uint32))
    key = _absorb(key, sample_index.to(tl.uint32))
    return _absorb(key, position.to(tl.uint32))


@triton.jit
def _uniform(low, high, ids):
    bits = _mix(_mix(ids.to(tl.uint32) + low) ^ high)
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _part_kernel(
    logits_ptr, temperature_ptr, seed_ptr, sample_index_ptr, position_ptr, score_ptr, token_ptr, best_ptr,
    stride, temperature_stride, seed_stride, sample_index_stride, position_stride, vocab, part_size, first,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per part of a row, whole blocks: its best score, that token, and its best logit (infinity if one is NaN)."""
    start_next(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    wait_previous(PDL)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    random = temperature != 0.0
    divisor = tl.where(random, temperature, 1.0)
    seed = tl.load(seed_ptr + row * seed_stride)
    sample_index = tl.load(sample_index_ptr + row * sample_index_stride)
    position = tl.load(position_ptr + row * position_stride)
    low = _row_key(tl.full((), LOW_KEY, tl.uint32), seed, sample_index, position)
    high = _row_key(tl.full((), HIGH_KEY, tl.uint32), seed, sample_index, position)
    reach = tl.where(random, MOST_NOISE, 0.0)
    peak = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    begin = part * part_size
    for start in range(begin, tl.minimum(begin + part_size, vocab), BLOCK):
        ids = start + lane
        x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
        # Rounded as torch rounds it: the plain division of Triton is an approximation.
        score = tl.div_rn(x, divisor + tl.zeros_like(x))
        # Most blocks are too far below the best one for any noise to matter.
        if tl.max(score, 0) + reach > peak:
            if random:
                score -= tl.log(-tl.log(_uniform(low, high, first + ids)))
            block_peak = tl.max(score, 0)
            block_token = tl.min(tl.where(score == block_peak, ids, NO_ID), 0)
            token = tl.where(block_peak > peak, block_token, token)
            peak = tl.maximum(peak, block_peak)
    broken = tl.max((best != best).to(tl.int32), 0) > 0
    at = row * tl.num_programs(0) + part
    tl.store(score_ptr + at, peak)
    tl.store(token_ptr + at, token)
    tl.store(best_ptr + at, tl.where(broken, float("inf"), tl.max(best, 0)))


@triton.jit
def _best_kernel(
    score_ptr, part_token_ptr, best_ptr, token_ptr, failed_ptr, out_score_ptr, parts, first,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    exists = part < parts
    wait_previous(PDL)
    score = tl.load(score_ptr + row * parts + part, mask=exists, other=float("-inf"))
    tokens = tl.load(part_token_ptr + row * parts + part, mask=exists, other=NO_ID)
    best = tl.max(tl.load(best_ptr + row * parts + part, mask=exists, other=float("-inf")), 0)
    peak = tl.max(score, 0)
    token = tl.min(tl.where(score == peak, tokens, NO_ID), 0)
    failed = (best == float("inf")) | (best == float("-inf"))
    tl.store(token_ptr + row, tl.where(failed, 0, token).to(tl.int64) + first)
    tl.store(failed_ptr + row, failed)
    tl.store(out_score_ptr + row, tl.where(failed, 0.0, peak))


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seed: Tensor, sample_index: Tensor, position: Tensor, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    failed = torch.empty(rows, dtype=torch.bool, device=logits.device)
    won = torch.empty(rows, device=logits.device)
    if not rows:
        return token, failed, won
    # The token does not depend on the number of parts, so a row's draw does not depend on its neighbours.
    wanted = max(4 * num_multiprocessors(logits.device) // rows, 1)
    size = triton.cdiv(triton.cdiv(vocab, min(wanted, triton.cdiv(vocab, BLOCK))), BLOCK) * BLOCK
    parts = triton.cdiv(vocab, size)
    # Of two halves of one tensor the second would begin anywhere, and kernels be compiled for that too.
    score, best = (torch.empty(rows, parts, device=logits.device) for _ in range(2))
    part_token = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _part_kernel[(parts, rows)](
        logits, temperature, seed, sample_index, position, score, part_token, best,
        logits.stride(0), temperature.stride(0), seed.stride(0), sample_index.stride(0), position.stride(0),
        vocab, size, start, BLOCK=BLOCK, num_warps=8, **options(logits),
    )  # fmt: skip
    _best_kernel[(rows,)](
        score, part_token, best, token, failed, won, parts, start,
        BLOCK=triton.next_power_of_2(parts), num_warps=1, **options(logits),
    )  # fmt: skip
    return token, failed, won
