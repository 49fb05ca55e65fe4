"""Steps whose chunks begin and end at every offset around a page, for Triton's attention against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rapid_infer.ops import OPS
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import OPTIONS, AttentionParams
from rapid_infer.ops.providers.triton.attention.paged_attention import paged_attention
from rapid_infer.ops.providers.triton.mla.context import mla_context
from rapid_infer.ops.providers.triton.mla.prefill import mla_prefill
from rapid_infer.testing.op_cases.attention import make_metadata

TOLERANCE = {
    torch.float32: {"atol": 5e-5, "rtol": 5e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
    torch.float16: {"atol": 5e-3, "rtol": 5e-3},
}
DTYPES = list(TOLERANCE)
Lengths = tuple[list[int], list[int]]


def borders(contexts: Iterable[int], chunks: Iterable[int]) -> Lengths:
    """(seq_lens, query_lens) of rows with every chunk after every context; chunks of one token first."""
    rows = sorted((chunk, context) for context in contexts for chunk in chunks)
    return [context + chunk for chunk, context in rows], [chunk for chunk, _ in rows]


def paged_case(
    lengths: Lengths, heads: int, kv_heads: int, dim: int, size: int, dtype: torch.dtype, device: str
) -> Any:
    """Arguments for paged_attention, with NaN wherever a cache holds no key of a row."""
    metadata, blocks = make_metadata(*lengths, size, device)
    caches = torch.full((2, blocks, size, kv_heads, dim), math.nan, dtype=dtype, device=device)
    block, slot = _keys(metadata, lengths[0], size)
    caches[:, block, slot] = torch.randn(2, len(block), kv_heads, dim, device=device).to(dtype)
    return {
        "q": torch.randn(sum(lengths[1]), heads, dim, device=device).to(dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "metadata": metadata,
        "params": AttentionParams(dim**-0.5, return_lse=True),
    }


def with_options(case: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The case with other options of its attention, `sinks=True` for random ones, or with other arguments."""
    if options.get("sinks") is True:
        options["sinks"] = torch.randn(case["q"].shape[1], device=case["q"].device)
    params = {name: options.pop(name) for name in OPTIONS if name in options}
    return {**case, "params": replace(case["params"], **params), **options}


def check_paged(case: dict[str, Any]) -> None:
    wanted = OPS["paged_attention"].reference(**_widened(case))
    _check(paged_attention(**case), wanted, case["q"].dtype)


def check_mla(
    lengths: Lengths, heads: int, rank: int, nope: int, rope: int, v: int, size: int, dtype: torch.dtype, device: str
) -> None:
    """What a chunk sees of its context, in the cache, and of itself with such a result taken in."""
    metadata, blocks = make_metadata(*lengths, size, device)
    tokens = sum(lengths[1])
    cache = torch.full((blocks, size, rank + rope), math.nan, dtype=dtype, device=device)
    block, slot = _keys(metadata, lengths[0], size)
    cache[block, slot] = torch.randn(len(block), rank + rope, device=device).to(dtype)
    context = {
        "q": torch.randn(tokens, heads, rank + rope, device=device).to(dtype),
        "cache": cache,
        "metadata": metadata,
        "scale": (rank + rope) ** -0.5,
        "rank": rank,
        "out": torch.randn(tokens, heads, rank, device=device).to(dtype),
        "lse": torch.randn(tokens, heads, device=device),
    }
    lse = _check_op("mla_context", mla_context, context, ("out", "lse"), dtype)["lse"]
    own = {
        "q_nope": torch.randn(tokens, heads, nope, device=device).to(dtype),
        "q_rope": torch.randn(tokens, heads, rope, device=device).to(dtype),
        "kv": torch.randn(tokens, heads, nope + v, device=device).to(dtype),
        "key": torch.randn(tokens, rope, device=device).to(dtype),
        "metadata": metadata,
        "scale": (nope + rope) ** -0.5,
        "out": torch.randn(tokens, heads, v, device=device).to(dtype),
        "context_lse": lse,
    }
    _check_op("mla_prefill", mla_prefill, own, ("out",), dtype)


def _check_op(
    name: str, fn: Callable[..., None], case: dict[str, Any], written: tuple[str, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """The case as the reference leaves it."""
    wanted = {k: x.clone() if isinstance(x, Tensor) else x for k, x in _widened(case).items()}
    OPS[name].reference(**wanted)
    fn(**case)
    _check(tuple(case[k] for k in written), tuple(wanted[k] for k in written), dtype)
    return wanted


def _keys(metadata: AttentionMetadata, seq_lens: list[int], size: int) -> tuple[Tensor, Tensor]:
    """Block and slot of every key."""
    row = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens))
    key = torch.cat([torch.arange(n) for n in seq_lens])
    return metadata.block_table.cpu()[row, key // size].long().to(metadata.rows.device), (key % size).to(
        metadata.rows.device
    )


def _widened(case: dict[str, Any]) -> dict[str, Any]:
    return {k: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in case.items()}


def _check(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.float(), other, **TOLERANCE[dtype])
