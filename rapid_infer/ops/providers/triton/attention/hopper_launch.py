"""Launches the attention kernel for SM 90."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.providers.triton.attention.hopper import hopper_kernel
from rapid_infer.ops.providers.triton.attention.prefill_config import PAGE, PrefillConfig, tma_view
from rapid_infer.ops.providers.triton.attention.prefill_plan import ENTRY
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options

REGISTERS = 168
"""Of a thread when the kernel starts: all of a multiprocessor's, for twelve warps."""


def prefill_hopper(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    metadata: AttentionMetadata,
    plan: Tensor,
    window: int | None,
    sinks: Tensor | None,
    scales: dict[str, Any],
    config: PrefillConfig,
) -> None:
    """As `prefill`, for a plan with `config.queries` query heads in a tile."""
    _, block_size, kv_heads, dim = k_cache.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    tiles = [
        TensorDescriptor.from_tensor(tma_view(cache, PAGE), [1, PAGE, dim], layout) for cache in (k_cache, v_cache)
    ]
    programs = min(kv_heads * plan.shape[0], num_multiprocessors(q.device))
    hopper_kernel[(programs,)](
        q, *tiles, out, lse if lse is not None else out, sinks if sinks is not None else q, metadata.block_table, plan,
        q.stride(0), q.stride(1), out.stride(0), metadata.block_table.stride(0), window or 0,
        HEADS=kv_heads, GROUP=q.shape[1] // kv_heads, DIM=dim, BLOCK_SIZE=block_size,
        STAGES=config.stages, ENTRY=ENTRY.value,
        WINDOW=window is not None, SINKS=sinks is not None, LSE=lse is not None,
        num_warps=4, maxnreg=REGISTERS, **scales, **options(q),
    )  # fmt: skip
