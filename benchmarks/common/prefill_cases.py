"""The attention steps with several tokens a row that are tuned, the configurations tried, and what is right."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.ops.providers.triton.attention.prefill_config import PrefillConfig
from rapid_infer.testing.op_cases.attention import make_metadata

BLOCK_SIZE = 64
HEAD_DIM = 128
HEADS = ((32, 8), (16, 8))


@dataclass(frozen=True)
class Task:
    """Rows with `query_lens` new tokens of `seq_lens`."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    heads: int
    kv_heads: int

    @property
    def flops(self) -> int:
        """Of what is seen: of a prompt, half the square."""
        seen = sum(m * (n - m) + m * (m + 1) // 2 for n, m in zip(self.seq_lens, self.query_lens))
        return 4 * seen * self.heads * HEAD_DIM

    @property
    def whole(self) -> bool:
        """Equal prompts with nothing cached: what SDPA can take."""
        return self.seq_lens == self.query_lens and len(set(self.seq_lens)) == 1


def _mixed() -> tuple[int, ...]:
    """700 lengths that add up to 8192, none of 1."""
    rng = random.Random(0)
    lengths = [2 + int(rng.paretovariate(1.2)) for _ in range(700)]
    while sum(lengths) != 8192:
        at = rng.randrange(700)
        lengths[at] = max(lengths[at] + (1 if sum(lengths) < 8192 else -1), 2)
    return tuple(lengths)


def tasks() -> list[Task]:
    found = []
    for heads, kv_heads in HEADS:
        for n, rows in ((8192, 1), (8192, 2), (2048, 8), (512, 32), (128, 1)):
            found.append(Task(f"{n}x{rows}", (n,) * rows, (n,) * rows, heads, kv_heads))
        found.append(Task("mixed", _mixed(), _mixed(), heads, kv_heads))
        found.append(Task("chunk", (28672 + 4096,), (4096,), heads, kv_heads))
        found.append(Task("turn", (32768 + 100,), (100,), heads, kv_heads))
    return found


HOPPER = [PrefillConfig(128, 64, 4, stages, tma=True, hopper=True) for stages in (2, 3)]
"""The kernel in Gluon, for SM 90 alone."""


def candidates(quick: bool) -> list[PrefillConfig]:
    """The first is what ran before TMA."""
    found = [
        PrefillConfig(128, 64, warps=8, stages=3),
        PrefillConfig(128, 64, warps=8, stages=2, tma=True),
        PrefillConfig(128, 64, warps=8, stages=3, tma=True),
        PrefillConfig(64, 64, warps=4, stages=2, tma=True),
        PrefillConfig(64, 64, warps=4, stages=3, tma=True),
    ]
    if not quick:
        found += [
            PrefillConfig(128, 64, warps=8, stages=4, tma=True),
            PrefillConfig(128, 32, warps=8, stages=3, tma=True),
            PrefillConfig(128, 32, warps=4, stages=3, tma=True),
            PrefillConfig(128, 64, warps=4, stages=2, tma=True),
            PrefillConfig(64, 32, warps=4, stages=2, tma=True),
            PrefillConfig(64, 32, warps=4, stages=3, tma=True),
            PrefillConfig(64, 64, warps=4, stages=3),
        ]
    return found


def make(task: Task) -> dict[str, Any]:
    """Arguments of the op; NaN is never read by it, so unused slots hold some."""
    metadata, blocks = make_metadata(list(task.seq_lens), list(task.query_lens), BLOCK_SIZE, "cuda")
    shape = blocks, BLOCK_SIZE, task.kv_heads, HEAD_DIM
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = metadata.block_table.long()
    used = torch.zeros(blocks * BLOCK_SIZE, dtype=torch.bool, device="cuda")
    for row, n in enumerate(task.seq_lens):
        key = torch.arange(n, device="cuda")
        used[table[row, key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE] = True
    for cache in (k, v):
        cache.view(-1, task.kv_heads, HEAD_DIM)[~used] = float("nan")
    q = torch.randn(sum(task.query_lens), task.heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    return {"q": q, "k_cache": k, "v_cache": v, "metadata": metadata, "params": AttentionParams(HEAD_DIM**-0.5)}


def sampled(task: Task, case: dict[str, Any], count: int = 48) -> tuple[Tensor, Tensor]:
    """(indices of some tokens, their attention in fp32 `[count, heads, dim]`), the ends of rows among them."""
    rng = random.Random(1)
    metadata: AttentionMetadata = case["metadata"]
    start = metadata.query_start.tolist()
    picked, outs = [], []
    for i in range(count):
        row = rng.randrange(len(task.seq_lens))
        m = task.query_lens[row]
        nth = (0, m - 1, rng.randrange(m))[i % 3]
        n = task.seq_lens[row] - m + nth + 1
        key = torch.arange(n, device="cuda")
        slots = metadata.block_table[row].long()[key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE
        k, v = (case[name].view(-1, task.kv_heads, HEAD_DIM)[slots].float() for name in ("k_cache", "v_cache"))
        q = case["q"][start[row] + nth].float().view(task.kv_heads, -1, HEAD_DIM)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) * case["params"].scale, dim=-1)
        outs.append(torch.einsum("hgn,nhd->hgd", weights, v).view(task.heads, HEAD_DIM))
        picked.append(start[row] + nth)
    return torch.tensor(picked, device="cuda"), torch.stack(outs)


def cudnn(task: Task) -> Callable[[], Any]:
    """torch's cuDNN attention of the same shape, keys and values contiguous."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    rows, n = len(task.seq_lens), task.seq_lens[0]
    q, k, v = (
        torch.randn(rows, n, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for heads in (task.heads, task.kv_heads, task.kv_heads)
    )

    def run() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def flash(case: dict[str, Any], version: int) -> Callable[[], Any]:
    """FlashAttention 3 as vLLM builds it, or flash-attn-4, on the same pages."""
    module = importlib.import_module(f"rapid_infer_ops_attention.flash_attn.version_{version}")
    return lambda: module.paged_attention(**case)
