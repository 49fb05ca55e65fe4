"""Cases of attention over pages and of what writes to them, and metadata to make more of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rapid_infer.cache.slots import slots_of
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.ops.reference.kv_cache import store_heads
from rapid_infer.testing.op_cases.case import Case, cases


def make_metadata(
    seq_lens: list[int], query_lens: list[int], block_size: int, device: str, spare_blocks: int = 2
) -> tuple[AttentionMetadata, int]:
    """Metadata with shuffled blocks for tests and benchmarks; returns it and the number of blocks.

    Rows of one token come first.
    """
    rows = len(seq_lens)
    per_row = max(math.ceil(n / block_size) for n in seq_lens)
    blocks = 1 + rows * per_row + spare_blocks
    table = torch.randperm(blocks - 1)[: rows * per_row].view(rows, per_row).int() + 1
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(seq_lens, query_lens)])
    row_of = torch.repeat_interleave(torch.arange(rows), torch.tensor(query_lens))
    slots = slots_of(table, row_of, positions, block_size)
    start = torch.tensor([0, *query_lens]).cumsum(0).int()
    metadata = AttentionMetadata(
        block_table=table.to(device),
        rows=torch.arange(rows, device=device),
        query_start=start.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        slots=slots.to(device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=query_lens.count(1),
    )
    return metadata, blocks


def in_mixed_graph(metadata: AttentionMetadata, rows: int, tokens: int) -> AttentionMetadata:
    """The same step as a CUDA graph of mixed steps has it, with that many rows and tokens of padding at the end."""
    zeros = torch.zeros(rows, dtype=torch.int32, device=metadata.rows.device)
    return replace(
        metadata,
        rows=torch.cat((metadata.rows, zeros)),
        query_start=torch.cat((metadata.query_start, metadata.query_start[-1:].expand(rows))),
        seq_lens=torch.cat((metadata.seq_lens, zeros)),
        slots=torch.cat((metadata.slots, metadata.slots.new_zeros(tokens))),
        num_decodes=len(metadata.rows) + rows,
        decodes=torch.tensor([metadata.num_decodes], dtype=torch.int32, device=metadata.rows.device),
        max_context_len=None,
        plans={},
    )


@cases
def paged_attention(dtype: torch.dtype, device: str) -> Iterator[Case]:
    batches = (([1], [1]), ([7, 64, 33], [1, 1, 1]), ([5, 40, 9, 23], [1, 1, 9, 4]), ([130], [130]), ([130], [37]))
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"window": 6},
        {"soft_cap": 3.0},
        {"sinks": True},
        {"return_lse": True},
        {"window": 5, "soft_cap": 2.0, "sinks": True, "return_lse": True},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "nvfp4", "soft_cap": 3.0},
    )
    for i, (seq_lens, query_lens) in enumerate(batches):
        for heads, kv_heads, dim, size in ((4, 4, 16, 4), (6, 2, 32, 16), (8, 1, 64, 16)):
            for variant in variants if i == 2 else variants[:1]:
                metadata, blocks = make_metadata(seq_lens, query_lens, size, device)
                options = dict(variant)
                stored, scales = options.pop("kv_cache_dtype", None), None
                if stored is not None:
                    options["kv_scales"] = scales = torch.rand(2, kv_heads, device=device) + 0.5
                kind = {None: dtype, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}[stored]
                k, v = (
                    store_heads(x, kind, None if scales is None else scales[side])
                    for side, x in enumerate(torch.randn(2, blocks, size, kv_heads, dim, device=device))
                )
                if options.get("sinks"):
                    options["sinks"] = torch.randn(heads, device=device)
                params = AttentionParams(dim**-0.5, **options)
                q = torch.randn(sum(query_lens), heads, dim, device=device).to(dtype)
                kwargs = {"q": q, "k_cache": k, "v_cache": v, "metadata": metadata, "params": params}
                yield Case(kwargs, {"head_dim": dim, "block_size": size, "kv_cache_dtype": stored, **params.options()})


def slots_only(slots: Tensor) -> AttentionMetadata:
    """Metadata for tests that only write: every token is a row of its own."""
    rows = torch.arange(len(slots), device=slots.device)
    ones = torch.ones_like(rows, dtype=torch.int32)
    start = torch.arange(len(slots) + 1, device=slots.device, dtype=torch.int32)
    return AttentionMetadata(rows[:, None].int(), rows, start, ones, slots, 1, 1, len(slots))


@cases
def qk_norm_rope_kv_write(dtype: torch.dtype, device: str) -> Iterator[Case]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    styles = ((4, 2, 16, 16, True, False), (3, 1, 24, 8, False, True), (2, 2, 8, 0, False, False))
    for heads, kv_heads, dim, rotary, norm, interleaved in styles:
        tokens, blocks, size = 9, 5, 4
        slots = torch.randperm(blocks * size, device=device)[:tokens]
        metadata = slots_only(slots)
        angle = torch.rand(64, rotary // 2, device=device)
        yield Case(
            {
                "qkv": rand(tokens, (heads + 2 * kv_heads) * dim),
                "positions": torch.randint(64, (tokens,), device=device),
                "cos_sin": torch.cat((angle.cos(), angle.sin()), -1) if rotary else None,
                "metadata": metadata,
                "k_cache": rand(blocks, size, kv_heads, dim),
                "v_cache": rand(blocks, size, kv_heads, dim),
                "q_weight": rand(dim) if norm else None,
                "k_weight": rand(dim) if norm else None,
                "eps": 1e-6,
                "interleaved": interleaved,
            },
            {"head_dim": dim, "rotary_dim": rotary},
        )
