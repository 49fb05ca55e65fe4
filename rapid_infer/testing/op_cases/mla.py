"""Cases of MLA."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_infer.ops.reference.kv_cache import store_latents
from rapid_infer.testing.op_cases.attention import in_mixed_graph, make_metadata, slots_only
from rapid_infer.testing.op_cases.case import Case, cases

SMALL, WIDE, MANY = (4, 16, 8, 4), (16, 64, 16, 16), (70, 24, 8, 16)
"""heads, rank, rope, block size"""


def _case(
    seq_lens: list[int],
    query_lens: list[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    padding: tuple[int, int] | None = None,
    stored: str | None = None,
) -> Case:
    """`padding`: rows and tokens, of a step whose number of decode rows only the device knows."""
    heads, rank, rope, size = shape
    metadata, blocks = make_metadata(seq_lens, query_lens, size, device)
    if padding is not None:
        metadata = in_mixed_graph(metadata, *padding)
    tokens = len(metadata.slots)
    latent, key = torch.randn(blocks * size, rank + rope, device=device).split((rank, rope), -1)
    cache = store_latents(latent, key, torch.uint8 if stored == "fp8" else dtype).view(blocks, size, -1)
    q = torch.randn(tokens, heads, rank + rope, device=device).to(dtype)
    out = torch.randn(tokens, heads, rank, device=device).to(dtype)
    kwargs = {"q": q, "cache": cache, "metadata": metadata, "scale": (rank + rope) ** -0.5, "rank": rank, "out": out}
    return Case(kwargs, {"rank": rank, "rope_dim": rope, "block_size": size, "kv_cache_dtype": stored})


@cases
def mla_decode(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for seq_lens, query_lens in (([1], [1]), ([7, 64, 33], [1, 1, 1]), ([5, 40, 9, 23], [1, 1, 9, 4])):
        for shape in (SMALL, WIDE, MANY):
            yield _case(seq_lens, query_lens, shape, dtype, device)
    for query_lens, padding in (([1, 1, 9, 4], (3, 5)), ([1, 1, 1, 1], (0, 2))):
        yield _case([5, 40, 9, 23], query_lens, SMALL, dtype, device, padding)
    yield _case([5, 40, 9, 23], [1, 1, 9, 4], WIDE, dtype, device, stored="fp8")


@cases
def mla_context(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for seq_lens, query_lens, padding, shapes, *stored in (
        ([5, 40, 9, 23], [1, 1, 9, 4], None, (SMALL, WIDE, MANY)),
        ([130], [37], None, (SMALL, WIDE)),
        ([30, 64, 2], [14, 32, 2], None, (SMALL,)),
        ([5, 40, 9, 23], [1, 1, 9, 4], (3, 5), (SMALL,)),
        ([30, 64, 2], [14, 32, 2], (1, 0), (SMALL,)),
        ([5, 40, 9, 23], [1, 1, 9, 4], None, (WIDE,), "fp8"),
    ):
        for shape in shapes:
            case = _case(seq_lens, query_lens, shape, dtype, device, padding, *stored)
            case.kwargs["lse"] = torch.randn(case.kwargs["q"].shape[:2], device=device)
            yield case


@cases
def mla_kv_write(dtype: torch.dtype, device: str) -> Iterator[Case]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for heads, nope, rank, rope, interleaved in ((4, 16, 32, 8, True), (3, 8, 24, 16, False), (20, 32, 64, 64, True)):
        tokens, blocks, size = 9, 5, 4
        angle = torch.rand(64, rope // 2, device=device)
        yield Case(
            {
                "q": rand(tokens, heads, nope + rope),
                "kv": rand(tokens, rank + rope),
                "positions": torch.randint(64, (tokens,), device=device),
                "cos_sin": torch.cat((angle.cos(), angle.sin()), -1),
                "metadata": slots_only(torch.randperm(blocks * size, device=device)[:tokens]),
                "cache": rand(blocks, size, rank + rope),
                "weight": rand(rank),
                "eps": 1e-6,
                "interleaved": interleaved,
                "query": rand(tokens, heads, rank + rope),
            },
            {"rank": rank, "rope_dim": rope},
        )


@cases
def mla_prefill(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for heads, nope, rope, v, query_lens, context, padding in (
        (2, 16, 8, 16, [9], False, None),
        (3, 8, 8, 12, [1, 1, 9, 4], True, None),
        (2, 32, 16, 24, [70, 2, 33], True, None),
        (2, 16, 8, 16, [1, 5, 18], True, (3, 5)),
        (2, 16, 8, 16, [20, 3], True, (0, 0)),
    ):
        metadata, _ = make_metadata([n + 3 for n in query_lens], query_lens, 4, device)
        if padding is not None:
            metadata = in_mixed_graph(metadata, *padding)
        tokens = len(metadata.slots)
        lse = torch.randn(tokens, heads, device=device)
        lse[: query_lens.count(1) + 3] = -math.inf
        kwargs = {
            "q_nope": torch.randn(tokens, heads, nope, device=device).to(dtype),
            "q_rope": torch.randn(tokens, heads, rope, device=device).to(dtype),
            "kv": torch.randn(tokens, heads, nope + v, device=device).to(dtype),
            "key": torch.randn(tokens, rope, device=device).to(dtype),
            "metadata": metadata,
            "scale": (nope + rope) ** -0.5,
            "out": torch.randn(tokens, heads, v, device=device).to(dtype),
            "context_lse": lse if context else None,
        }
        yield Case(kwargs, {"nope_dim": nope, "rope_dim": rope, "v_dim": v})
