"""A router's scores, and the choice of experts from them: one program per token, all in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.linear.linear import chosen, product
from rapid_infer.ops.reference.router_logits import router_logits as reference


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    config = chosen(x, weight)
    return reference(x, weight) if config is None else product(x, weight, config, torch.float32)


@triton.jit
def _rank(x, exists):
    """int32 in the order of fp32 `x`; the least there is, which no number has, for NaN and what does not exist.

    A warp finds the highest of integers in one instruction, that of other numbers in five, one after another.
    """
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(exists & (x == x), bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, token_mask_ptr, expert_map_ptr, weights_ptr, out_ptr, stride, scale,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr,
    TOKEN_MASK: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores stand as `[groups, experts of a group]`, both padded to powers of two."""
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD)
    expert = group[:, None] * SIZE + member[None, :]
    exists = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    expert_map = tl.load(expert_map_ptr + expert, mask=exists, other=-1)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + expert, mask=exists, other=0.0)
    wait_previous(PDL)
    logits = tl.load(logits_ptr + token * stride + expert, mask=exists, other=float("-inf"))
    token_mask = 1
    if TOKEN_MASK:
        token_mask = tl.load(token_mask_ptr + token)
    if SIGMOID:
        score = tl.sigmoid(logits)
    else:
        score = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    choice = score + bias
    if TOP_GROUPS < GROUPS:
        choice = tl.where(exists, choice, float("-inf"))
        worth = tl.max(choice, 1)
        if BIAS:
            best = tl.min(tl.where(choice == worth[:, None], member[None, :], SIZE_PAD), 1)
            worth += tl.max(tl.where(member[None, :] == best[:, None], float("-inf"), choice), 1)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            at = tl.min(tl.where(worth == tl.max(worth, 0), group, GROUPS_PAD), 0)
            kept = kept | (group == at)
            worth = tl.where(group == at, float("-inf"), worth)
        exists = exists & kept[:, None]
    place = tl.arange(0, TOP_K_PAD)
    slot = tl.full([TOP_K_PAD], -1, tl.int32)
    weights = tl.zeros([TOP_K_PAD], tl.int32)
    expert = tl.ravel(expert)
    rank = tl.ravel(_rank(choice, exists))
    bits = tl.ravel(score.to(tl.int32, bitcast=True))
    expert_map = tl.ravel(expert_map)
    for i in tl.static_range(TOP_K):
        best = tl.max(rank, 0)
        found = (rank == best) & (best > -0x80000000)
        # The lowest of equals, or none, as with NaN.
        mine = found & (expert == tl.min(tl.where(found, expert, EXPERTS), 0))
        slot = tl.where(place == i, tl.max(tl.where(mine, expert_map, -1), 0), slot)
        weights = tl.where(place == i, tl.sum(tl.where(mine, bits, 0), 0), weights)
        rank = tl.where(mine, -0x80000000, rank)
    weights = weights.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    slot = tl.where(token_mask > 0, slot, -1)
    to = token * TOP_K + place
    tl.store(weights_ptr + to, tl.where(slot >= 0, weights * scale, 0.0), mask=place < TOP_K)
    tl.store(out_ptr + to, slot, mask=place < TOP_K)


def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    token_mask: Tensor | None,
    expert_map: Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """A token whose scores are NaN gets no expert."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    out = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    size = experts // groups
    if tokens:
        _route_kernel[(tokens,)](
            logits, bias if bias is not None else logits, token_mask if token_mask is not None else expert_map,
            expert_map, weights, out, logits.stride(0), scale,
            EXPERTS=experts, GROUPS=groups, GROUPS_PAD=triton.next_power_of_2(groups),
            SIZE=size, SIZE_PAD=triton.next_power_of_2(size), TOP_K=top_k, TOP_K_PAD=triton.next_power_of_2(top_k),
            TOP_GROUPS=top_groups, SIGMOID=scoring == "sigmoid", BIAS=bias is not None,
            TOKEN_MASK=token_mask is not None, RENORMALIZE=renormalize, num_warps=1, **options(logits),
        )  # fmt: skip
    return weights, out
