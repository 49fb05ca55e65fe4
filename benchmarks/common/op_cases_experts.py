"""Inputs of the operators that mixtures of experts and MLA add, where the model's config has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from common.op_cases import BLOCK_SIZE, TOKENS
from common.op_shapes import OpCase, Shape, builds, values
from rapid_infer.testing.op_cases.attention import make_metadata, slots_only


def _need(s: Shape, *names: str) -> tuple[int, ...]:
    """LookupError when the model has no such sizes."""
    absent = [name for name in names if not isinstance(s.raw.get(name), int)]
    if absent:
        raise LookupError(f"{s.model} has no {', '.join(absent)}")
    return tuple(s.raw[name] for name in names)


def _experts(s: Shape) -> tuple[int, int, int]:
    count = "n_routed_experts" if "n_routed_experts" in s.raw else "num_experts"
    experts, top_k, size = _need(s, count, "num_experts_per_tok", "moe_intermediate_size")
    return experts, top_k, size


@builds("router_logits", "route_experts", "fused_experts")
def _moe(s: Shape) -> Iterator[OpCase]:
    """Each token's experts are a uniform random draw."""
    experts, top_k, size = _experts(s)
    width = s.dtype.itemsize
    for t in s.pick(TOKENS):

        def draw(t: int = t) -> torch.Tensor:
            return torch.rand(t, experts, device=s.device)

        def make_logits(t: int = t) -> dict[str, Any]:
            return {"x": s.rand(t, s.hidden), "weight": s.weight(experts, s.hidden)}

        def make_route(t: int = t) -> dict[str, Any]:
            expert_map = torch.arange(experts, dtype=torch.int32, device=s.device)
            tensors = {"logits": draw(t), "bias": None, "token_mask": None, "expert_map": expert_map}
            settings = {"top_k": top_k, "groups": 1, "top_groups": 1, "scoring": "softmax", "renormalize": True}
            return {**tensors, **settings, "scale": 1.0}

        def make_experts(t: int = t) -> dict[str, Any]:
            weights, slots = draw(t).topk(top_k, dim=-1)
            return {
                "x": s.rand(t, s.hidden),
                "gate_up": s.rand(experts, 2 * size, s.hidden).div_(s.hidden**0.5),
                "down": s.rand(experts, s.hidden, size).div_(size**0.5),
                "weights": weights,
                "slots": slots.int(),
                "shared": None,
            }

        nbytes = values(t * s.hidden, experts * s.hidden, size=width) + 4 * t * experts
        flops = 2 * t * experts * s.hidden
        yield OpCase("router_logits", f"{t} x {s.hidden}, {experts}", make_logits, nbytes, flops, cold=("weight",))
        yield OpCase("route_experts", f"{t} x {top_k} of {experts}", make_route, t * (4 * experts + 8 * top_k))
        touched = round(experts * (1 - (1 - top_k / experts) ** t))
        nbytes = values(2 * t * s.hidden, touched * 3 * size * s.hidden, size=width)
        flops, extra = 6 * t * top_k * size * s.hidden, {"hidden_size": s.hidden, "intermediate_size": size}
        label, cold = f"{t} x {top_k} of {experts}, {size}", ("gate_up", "down")
        yield OpCase("fused_experts", label, make_experts, nbytes, flops, cold, extra)


@builds("mla_kv_write", "mla_decode", "mla_context", "mla_prefill")
def _mla(s: Shape) -> Iterator[OpCase]:
    rank, rope, nope, v = _need(s, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    width, item = rank + rope, s.dtype.itemsize
    for t in s.pick(TOKENS):

        def make_write(t: int = t) -> dict[str, Any]:
            blocks, angle = 2 * (t // BLOCK_SIZE + 1), torch.rand(max(t, 64), rope // 2, device=s.device)
            return {
                "q": s.rand(t, s.heads, nope + rope),
                "kv": s.rand(t, width),
                "positions": torch.arange(t, device=s.device),
                "cos_sin": torch.cat((angle.cos(), angle.sin()), -1),
                "metadata": slots_only(torch.randperm(blocks * BLOCK_SIZE, device=s.device)[:t]),
                "cache": s.rand(blocks, BLOCK_SIZE, width),
                "weight": s.rand(rank),
                "eps": 1e-6,
                "interleaved": True,
                "query": s.rand(t, s.heads, width),
            }

        nbytes = values(2 * t * (s.heads * rope + width), size=item)
        yield OpCase("mla_kv_write", f"{t} x {s.heads} heads", make_write, nbytes)
    decode = {"decode 1 x 384": [384], "decode 32 x 640": [640] * 32, "decode 256 x 1024": [1024] * 256}
    for label, lengths in list(decode.items())[: 1 if s.quick else None]:
        yield _attend("mla_decode", label, s, lengths, [1] * len(lengths), (rank, rope), sum(lengths))
    steps = {"64 after 2048, 32 rows": (2112, 64, 32), "8192 after 8192": (16384, 8192, 1)}
    steps = {"8 after 32": (40, 8, 1)} if s.quick else steps
    for label, (n, m, rows) in steps.items():
        yield _attend("mla_context", label, s, [n] * rows, [m] * rows, (rank, rope), rows * m * (n - m))
    for label, lengths in {"128": [128]}.items() if s.quick else {"8192": [8192], "512 x 16": [512] * 16}.items():
        yield _together(label, s, lengths, (nope, rope, v))


def _attend(
    op: str, label: str, s: Shape, seq_lens: list[int], query_lens: list[int], sizes: tuple[int, int], seen: int
) -> OpCase:
    """`seen`: pairs of a query and a key."""
    rank, rope = sizes
    tokens, width = sum(query_lens), rank + rope

    def make() -> dict[str, Any]:
        metadata, blocks = make_metadata(seq_lens, query_lens, BLOCK_SIZE, s.device)
        cache, q = s.rand(blocks, BLOCK_SIZE, width), s.rand(tokens, s.heads, width)
        made = {"q": q, "cache": cache, "metadata": metadata, "scale": width**-0.5, "rank": rank}
        made["out"] = s.rand(tokens, s.heads, rank)
        if op == "mla_context":
            made["lse"] = torch.empty(tokens, s.heads, device=s.device)
        return made

    nbytes = values(sum(seq_lens) * width, tokens * s.heads * (width + rank), size=s.dtype.itemsize)
    extra = {"rank": rank, "rope_dim": rope, "block_size": BLOCK_SIZE}
    return OpCase(op, label, make, nbytes, 2 * seen * s.heads * (width + rank), ("cache",), extra)


def _together(label: str, s: Shape, lengths: list[int], sizes: tuple[int, int, int]) -> OpCase:
    nope, rope, v = sizes
    tokens = sum(lengths)

    def make() -> dict[str, Any]:
        return {
            "q_nope": s.rand(tokens, s.heads, nope),
            "q_rope": s.rand(tokens, s.heads, rope),
            "kv": s.rand(tokens, s.heads, nope + v),
            "key": s.rand(tokens, rope),
            "metadata": make_metadata(lengths, lengths, BLOCK_SIZE, s.device)[0],
            "scale": (nope + rope) ** -0.5,
            "out": s.rand(tokens, s.heads, v),
            "context_lse": None,
        }

    seen = sum(n * (n + 1) // 2 for n in lengths)
    nbytes = values(tokens * (s.heads * (2 * nope + rope + 2 * v) + rope), size=s.dtype.itemsize)
    extra = {"nope_dim": nope, "rope_dim": rope, "v_dim": v}
    return OpCase("mla_prefill", label, make, nbytes, 2 * seen * s.heads * (nope + rope + v), extra=extra)
