"""FlashInfer's attention over pages. The library chooses its kernel for the GPU."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from rapid_infer.ops import AttentionMetadata, AttentionParams

# Below the runtime's own, which is what users are told to turn up.
logger = logging.getLogger("rapid_infer.ops.flashinfer")

WORKSPACE_BYTES = 128 * 2**20
"""What the library asks for, to add up parts of keys."""


@cache
def _workspace(device: torch.device) -> Tensor:
    """For all layers and steps, which follow each other on one stream; kept as long as the process."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def _wrapper(device: torch.device, kind: Any) -> Any:
    """Holds one plan, the newest: planning waits for the step before, so no kernel still reads the last one."""
    logger.info("FlashInfer compiles a kernel when it is first needed, which takes minutes; it keeps what it compiled")
    return BatchPrefillWithPagedKVCacheWrapper(_workspace(device), kv_layout="NHD", backend="auto")


def _pages(metadata: AttentionMetadata, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query_start, first page of each row, pages, keys on each row's last page), all int32; the pages alone are on
    the device.
    """
    key = "flashinfer pages", block_size
    if key not in metadata.plans:
        start, lengths = (each.cpu() for each in (metadata.query_start, metadata.seq_lens))
        count = (lengths + block_size - 1) // block_size
        first = torch.zeros_like(start)
        torch.cumsum(count, dim=0, dtype=torch.int32, out=first[1:])
        row = torch.repeat_interleave(torch.arange(len(count)), count)
        column = torch.arange(len(row)) - first[row]
        row, column = (each.to(metadata.rows.device) for each in (row, column))
        pages = metadata.block_table[metadata.rows[row], column]
        metadata.plans[key] = start, first, pages, lengths - (count - 1) * block_size
    return metadata.plans[key]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> Tensor | tuple[Tensor, Tensor]:
    """Planned by the first layer of a step that has these arguments, which waits for the device."""
    block_size, kv_heads = k_cache.shape[1:3]
    kind = (*q.shape[1:], kv_heads, block_size, q.dtype, params.scale, params.window, params.soft_cap)
    key = "flashinfer", kind
    wrapper = metadata.plans.get(key)
    if wrapper is None:
        wrapper = metadata.plans[key] = _wrapper(q.device, kind)
        start, first, pages, last = _pages(metadata, block_size)
        wrapper.plan(
            qo_indptr=start,
            paged_kv_indptr=first,
            paged_kv_indices=pages,
            paged_kv_last_page_len=last,
            num_qo_heads=q.shape[1],
            num_kv_heads=kv_heads,
            head_dim_qk=q.shape[2],
            page_size=block_size,
            causal=True,
            sm_scale=params.scale,
            window_left=-1 if params.window is None else params.window - 1,
            logits_soft_cap=params.soft_cap,
            q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
        )
    if not params.return_lse:
        return wrapper.run(q.contiguous(), (k_cache, v_cache))
    out, lse = wrapper.run(q.contiguous(), (k_cache, v_cache), return_lse=True)
    # Its logarithms are to the base of 2.
    return out, lse * math.log(2)
