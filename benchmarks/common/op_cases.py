"""Inputs of every operator in the shapes of a model, with the bytes and FLOPs that the work cannot do without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from common.op_shapes import OpCase, Shape, builds, fit, values
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.testing.op_cases.attention import make_metadata, slots_only

BLOCK_SIZE = 64
TOKENS = (1, 32, 256, 8192)
LINEAR_TOKENS = (1, 16, 32, 64, 256, 8192)
SAMPLED = (1, 32, 256)


@builds("rms_norm", "fused_add_rms_norm")
def _norms(s: Shape) -> Iterator[OpCase]:
    for t in s.pick(TOKENS):
        n = t * s.hidden

        def make(t: int = t) -> dict[str, Any]:
            return {"x": s.rand(t, s.hidden), "weight": s.rand(s.hidden), "eps": 1e-6}

        def make_add(t: int = t) -> dict[str, Any]:
            return {"x": s.rand(t, s.hidden), "residual": s.rand(t, s.hidden), "weight": s.rand(s.hidden), "eps": 1e-6}

        size = s.dtype.itemsize
        yield OpCase("rms_norm", f"{t} x {s.hidden}", make, values(n, n, s.hidden, size=size))
        yield OpCase("fused_add_rms_norm", f"{t} x {s.hidden}", make_add, values(4 * n, s.hidden, size=size))


@builds("embedding")
def _embedding(s: Shape) -> Iterator[OpCase]:
    for t in s.pick(TOKENS):

        def make(t: int = t) -> dict[str, Any]:
            ids = torch.randint(s.vocab, (t,), device=s.device)
            return fit("embedding", {"input_ids": ids, "weight": s.rand(s.vocab, s.hidden)})

        yield OpCase("embedding", f"{t} x {s.hidden}", make, values(2 * t * s.hidden, size=s.dtype.itemsize) + 8 * t)


@builds("silu_and_mul")
def _silu(s: Shape) -> Iterator[OpCase]:
    for t in s.pick(TOKENS):
        nbytes = values(3 * t * s.intermediate, size=s.dtype.itemsize)
        yield OpCase(
            "silu_and_mul", f"{t} x {s.intermediate}", lambda t=t: {"gate_up": s.rand(t, 2 * s.intermediate)}, nbytes
        )


@builds("qk_norm_rope_kv_write")
def _rope(s: Shape) -> Iterator[OpCase]:
    for t in s.pick(TOKENS):
        width = (s.heads + 2 * s.kv_heads) * s.head_dim

        def make(t: int = t, width: int = width) -> dict[str, Any]:
            blocks = 2 * (t // BLOCK_SIZE + 1)
            angle = torch.rand(max(t, 64), s.head_dim // 2, device=s.device)
            return {
                "qkv": s.rand(t, width),
                "positions": torch.arange(t, device=s.device),
                "cos_sin": torch.cat((angle.cos(), angle.sin()), -1),
                "metadata": slots_only(torch.randperm(blocks * BLOCK_SIZE, device=s.device)[:t]),
                "k_cache": s.rand(blocks, BLOCK_SIZE, s.kv_heads, s.head_dim),
                "v_cache": s.rand(blocks, BLOCK_SIZE, s.kv_heads, s.head_dim),
                "q_weight": s.rand(s.head_dim),
                "k_weight": s.rand(s.head_dim),
                "eps": 1e-6,
                "interleaved": False,
            }

        nbytes = values(2 * t * width, size=s.dtype.itemsize) + t * (4 * s.head_dim + 16)
        extra = {"head_dim": s.head_dim, "rotary_dim": s.head_dim}
        yield OpCase("qk_norm_rope_kv_write", f"{t} x {s.heads}+2*{s.kv_heads} heads", make, nbytes, extra=extra)


@builds("linear", "linear_silu_and_mul")
def _linear(s: Shape) -> Iterator[OpCase]:
    matrices = {
        "qkv": ((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
        "o": (s.hidden, s.heads * s.head_dim),
        "gate_up": (2 * s.intermediate, s.hidden),
        "down": (s.hidden, s.intermediate),
    }
    size = s.dtype.itemsize
    for name, (n, k) in matrices.items():
        for m in s.pick(LINEAR_TOKENS):
            yield _product("linear", name, s, (m, n, k), m * n * size)
            if name == "gate_up":
                yield _product("linear_silu_and_mul", name, s, (m, n, k), m * n // 2 * size)


@builds("lm_head", "lm_head_argmax")
def _lm_head(s: Shape) -> Iterator[OpCase]:
    for m in s.pick(SAMPLED):
        yield _product("lm_head", "head", s, (m, s.vocab, s.hidden), 4 * m * s.vocab)
        yield _product("lm_head_argmax", "head", s, (m, s.vocab, s.hidden), 12 * m)


def _product(op: str, name: str, s: Shape, mnk: tuple[int, int, int], out_bytes: int) -> OpCase:
    """x `[m, k]` times a weight `[n, k]`."""
    m, n, k = mnk

    def make() -> dict[str, Any]:
        x = s.rand(m, k)
        return fit(op, {"x": x, "hidden": x, "weight": s.weight(n, k)})

    nbytes = values(m * k, n * k, size=s.dtype.itemsize) + out_bytes
    return OpCase(op, f"{name} {n}x{k}, M {m}", make, nbytes, 2 * m * n * k, cold=("weight",))


@builds("paged_attention")
def _attention(s: Shape) -> Iterator[OpCase]:
    rng = random.Random(0)
    if s.quick:
        decode = {"decode 1 x 384": [384], "decode mixed 8 rows": [rng.randint(10, 300) for _ in range(8)]}
        prefill = {"prefill 128 x 2": [128] * 2}
    else:
        decode = {
            "decode 256 x 1024": [1024] * 256,
            "decode 32 x 640": [640] * 32,
            "decode 1 x 384": [384],
            "decode 8 x 32768": [32768] * 8,
            "decode mixed 100..2048 x 150": [rng.randint(100, 2048) for _ in range(150)],
        }
        prefill = {"prefill 8192 x 2": [8192] * 2, "prefill 2048 x 8": [2048] * 8, "prefill 512 x 32": [512] * 32}
    for label, lengths in decode.items():
        yield _attend(label, s, lengths, [1] * len(lengths))
    for label, lengths in prefill.items():
        yield _attend(label, s, lengths, lengths)


def _attend(label: str, s: Shape, seq_lens: list[int], query_lens: list[int]) -> OpCase:
    params = AttentionParams(s.head_dim**-0.5)

    def make() -> dict[str, Any]:
        metadata, blocks = make_metadata(seq_lens, query_lens, BLOCK_SIZE, s.device)
        return {
            "q": s.rand(sum(query_lens), s.heads, s.head_dim),
            "k_cache": s.rand(blocks, BLOCK_SIZE, s.kv_heads, s.head_dim),
            "v_cache": s.rand(blocks, BLOCK_SIZE, s.kv_heads, s.head_dim),
            "metadata": metadata,
            "params": params,
        }

    # Query j of m sees n - m + j + 1 keys.
    seen = sum(m * (n - m) + m * (m + 1) // 2 for n, m in zip(seq_lens, query_lens))
    kv, q = 2 * sum(seq_lens) * s.kv_heads * s.head_dim, sum(query_lens) * s.heads * s.head_dim
    extra = {"head_dim": s.head_dim, "block_size": BLOCK_SIZE, **params.options()}
    nbytes = values(kv, 2 * q, size=s.dtype.itemsize)
    return OpCase(
        "paged_attention", label, make, nbytes, 4 * seen * s.heads * s.head_dim, ("k_cache", "v_cache"), extra
    )


@builds("truncate_logits", "gumbel_argmax")
def _sampling(s: Shape) -> Iterator[OpCase]:
    """Arguments go by name: settings of every row, of which an op takes those it wants."""
    for rows in s.pick(SAMPLED):
        for op in ("truncate_logits", "gumbel_argmax"):

            def make(op: str = op, rows: int = rows) -> dict[str, Any]:
                def full(value: float, dtype: torch.dtype) -> Tensor:
                    return torch.full((rows,), value, dtype=dtype, device=s.device)

                position = torch.arange(rows, device=s.device)
                known = {
                    "logits": 3 * torch.randn(rows, s.vocab, device=s.device),
                    "temperature": full(0.8, torch.float32),
                    "top_k": full(50, torch.int32),
                    "top_p": full(0.9, torch.float32),
                    "min_p": None,
                    "seed": full(7, torch.int64),
                    "sample_index": full(0, torch.int32),
                    "position": position,
                    "positions": position,
                }
                return fit(op, known)

            passes = 2 if op == "truncate_logits" else 1
            # A second truncation of the same row would find nothing left to do.
            reused = ("logits",) if op == "truncate_logits" else ()
            yield OpCase(op, f"{rows} x {s.vocab}", make, values(passes * rows * s.vocab, size=4), reused=reused)
