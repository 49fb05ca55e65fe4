"""What the libraries want that a step does not have: derived once a step, and shared by the layers.

Made on the device without a wait, so that a CUDA graph can record it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from rapid_infer.ops import AttentionMetadata


def block_table(metadata: AttentionMetadata) -> Tensor:
    """`[R, max_blocks]` int32: the table's rows that take part."""
    if "flash_attn block_table" not in metadata.plans:
        metadata.plans["flash_attn block_table"] = metadata.block_table[metadata.rows]
    return cast(Tensor, metadata.plans["flash_attn block_table"])


def key_start(metadata: AttentionMetadata) -> Tensor:
    """`[R + 1]` int32: sums of `seq_lens`, from 0."""
    if "flash_attn key_start" not in metadata.plans:
        sums = torch.zeros_like(metadata.query_start)
        torch.cumsum(metadata.seq_lens, dim=0, dtype=torch.int32, out=sums[1:])
        metadata.plans["flash_attn key_start"] = sums
    return cast(Tensor, metadata.plans["flash_attn key_start"])
