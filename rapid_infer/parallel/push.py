"""All-reduce by stores into the peers' memory: what the kernels of `collective` work on, and their launches.

Imports Triton, so it is imported only where this provider is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from rapid_infer.ops.providers.triton.collective.gather import all_gather_kernel
from rapid_infer.ops.providers.triton.collective.one_shot import all_reduce_add_rms_norm_kernel, all_reduce_kernel
from rapid_infer.ops.providers.triton.collective.two_shot import two_shot_kernel
from rapid_infer.ops.providers.triton.launch import options
from rapid_infer.ops.providers.triton.norm import block_and_warps

ALIGNMENT = 16
"""Elements: chunks and slots begin at multiples."""
EXTRA_HOP_BYTES = 1 << 20
"""About what one link carries in the 2.5 us that a second exchange takes."""
MAX_POLLS = 1 << 24
"""Looks at the slots before a kernel gives up and writes the error word: 10 s or more."""
MAX_PROGRAMS = 1 << 16
"""`protocol.CALL`."""
WARPS = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STAGES = ("push", "reduce", "collect")
"""Of a call, in the order in which all ranks must pass them; a one-shot call does nothing in "reduce"."""


class PushRefused(ValueError):
    """The message's shape or dtype is not for this provider. All ranks refuse alike, and nothing was launched."""


class PushBuffers:
    """One rank's view of the workspaces of `world_size` ranks, `max_bytes` per epoch and sender, for one stream.

    ptrs: the ranks' workspaces, as addresses that this rank's device can write to, or as such an int64 tensor on it.
    memory: this rank's own, uint8 `[workspace_bytes(world_size, max_bytes)]`, all zeros before any rank's first call.
    error: int32 `[1]`, on a GPU pinned host memory: 0, or by bits the ranks whose data a kernel did not wait for any
    longer; from then on results are wrong, and kernels do not wait.
    state: int32 `[2]` on the device, the counter of calls and such an error.
    """

    def __init__(
        self, ptrs: Sequence[int] | Tensor, memory: Tensor, rank: int, world_size: int, max_bytes: int
    ) -> None:
        size = workspace_bytes(world_size, max_bytes)
        if memory.dtype != torch.uint8 or memory.numel() < size or not memory.is_contiguous():
            raise ValueError(f"memory must be uint8 [{size}] or larger, got {memory.dtype} {list(memory.shape)}")
        if len(ptrs) != world_size or not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} cannot have {len(ptrs)} workspaces")
        device = memory.device
        self.ptrs = torch.as_tensor(ptrs, dtype=torch.int64).to(device)
        self.memory = memory
        self.rank = rank
        self.world_size = world_size
        self.max_bytes = max_bytes
        self.one_shot_bytes = one_shot_bytes(world_size, max_bytes)
        self.max_polls = MAX_POLLS
        self.state = torch.zeros(2, dtype=torch.int32, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    @classmethod
    def simulated(cls, world_size: int, max_bytes: int, device: torch.device | str) -> list[PushBuffers]:
        """Those of all ranks, in one process and on one device."""
        size = workspace_bytes(world_size, max_bytes)
        memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world_size)]
        ptrs = [m.data_ptr() for m in memory]
        return [cls(ptrs, m, rank, world_size, max_bytes) for rank, m in enumerate(memory)]

    @classmethod
    def rendezvous(cls, group: Any, max_bytes: int, device: torch.device) -> PushBuffers:
        """Those of a process group's ranks, in torch's symmetric memory: collective, once per group and stream.

        RuntimeError where this torch, or the machine, has none.
        """
        import torch.distributed._symmetric_memory as symmetric

        if not hasattr(symmetric, "empty") or not hasattr(symmetric, "rendezvous"):
            raise RuntimeError(f"torch {torch.__version__} has no symmetric memory")
        size = workspace_bytes(group.size(), max_bytes)
        memory = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
        # The rendezvous below lets no rank go on before all have come here.
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(memory, group)
        return cls(handle.buffer_ptrs, memory, handle.rank, handle.world_size, max_bytes)

    def chunk(self, size: int) -> int:
        """Elements that each rank sums of `size`, the last one maybe fewer."""
        return triton.cdiv(triton.cdiv(size, self.world_size), ALIGNMENT) * ALIGNMENT

    def takes_one_shot(self, size: int, itemsize: int) -> bool:
        return size * itemsize <= self.one_shot_bytes

    def takes_two_shot(self, size: int, itemsize: int) -> bool:
        """Also that no chunk is empty: every rank must hear from all others in each call."""
        chunk = self.chunk(size)
        return 2 * chunk * itemsize <= self.max_bytes and chunk * (self.world_size - 1) < size


def workspace_bytes(world_size: int, max_bytes: int) -> int:
    """ValueError where slots of `max_bytes` would not be aligned."""
    if max_bytes % (4 * ALIGNMENT) or max_bytes <= 0:
        raise ValueError(f"max_bytes must be a positive multiple of {4 * ALIGNMENT}, got {max_bytes}")
    return 2 * world_size * max_bytes


def one_shot_bytes(world_size: int, max_bytes: int) -> int:
    """The largest message that is sent whole: two shots send fewer bytes from three ranks on, but take two hops."""
    if world_size <= 2:
        return max_bytes
    saved = (world_size - 1) * (1 - 2 / world_size)
    return min(max_bytes, int(EXTRA_HOP_BYTES / saved))


def push_all_reduce(buffers: PushBuffers, x: Tensor, out: Tensor, stages: Sequence[str] = STAGES) -> Tensor:
    """`out` = the sum of all ranks' x, added in fp32 in rank order and rounded once: the same bits on every rank.

    x, out `[tokens, size]`, contiguous and of one dtype of DTYPES; out may be x. A sum of zeros is +0. Fewer `stages`
    are for ranks that one process simulates: each stage is launched for all of them before the next. PushRefused
    where the message is too large.
    """
    _check(x, out)
    size = x.numel()
    if buffers.takes_one_shot(size, x.itemsize):
        _all_reduce(buffers, x, out, stages)
    elif buffers.takes_two_shot(size, x.itemsize):
        _two_shot(buffers, x, out, stages)
    else:
        raise PushRefused(f"{size * x.itemsize} bytes; push takes less, its slots have {buffers.max_bytes}")
    return out


def push_all_reduce_add_rms_norm(
    buffers: PushBuffers,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual_out: Tensor,
    stages: Sequence[str] = STAGES,
) -> tuple[Tensor, Tensor]:
    """`residual_out` = residual + push_all_reduce(x); `out` = rms_norm(residual_out): the bits of the Triton operators.

    x, residual, out, residual_out `[tokens, size]`, weight `[size]`; out may be x, residual_out may be residual.
    PushRefused where the message is too large to be sent whole.
    """
    _check(x, residual, weight, out, residual_out)
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    if not buffers.takes_one_shot(x.numel(), x.itemsize) or rows > MAX_PROGRAMS:
        raise PushRefused(
            f"{rows} rows of {size * x.itemsize} bytes; push takes {buffers.one_shot_bytes} bytes at most"
        )
    if rows and _does_one_shot(stages):
        block, warps = block_and_warps(size)
        all_reduce_add_rms_norm_kernel[(rows,)](
            *_exchange(buffers, x), x, residual, weight, out, residual_out, size, eps,
            **_flags(buffers, x, stages), BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out, residual_out


def push_all_gather(buffers: PushBuffers, x: Tensor, out: Tensor, stages: Sequence[str] = STAGES) -> Tensor:
    """`out` `[world_size, *x.shape]` = every rank's x, bit for bit but for words of -2^31 (-0), which arrive as zeros.

    x, out contiguous, of any type whose elements fill words of four bytes. What is larger than a slot goes in several
    calls. PushRefused where it does not come out in words.
    """
    if x.nbytes % 4 or not x.is_contiguous() or not out.is_contiguous():
        raise PushRefused(f"{x.nbytes} bytes; push gathers contiguous words of four bytes")
    words, gathered = x.view(-1).view(torch.int32), out.view(buffers.world_size, -1).view(torch.int32)
    size, piece = words.numel(), buffers.max_bytes // 4
    for start in range(0, size, piece):
        some, into = words[start : start + piece], gathered[:, start:]
        all_gather_kernel[(triton.cdiv(some.numel(), _block(some)),)](
            *_exchange(buffers, some), some, into, some.numel(), size,
            **_flags(buffers, some, stages), BLOCK=_block(some), num_warps=WARPS,
        )  # fmt: skip
    return out


def _all_reduce(buffers: PushBuffers, x: Tensor, out: Tensor, stages: Sequence[str]) -> None:
    size, block = x.numel(), _block(x)
    if size and _does_one_shot(stages):
        all_reduce_kernel[(triton.cdiv(size, block),)](
            *_exchange(buffers, x), x, out, size, **_flags(buffers, x, stages), BLOCK=block, num_warps=WARPS
        )


def _two_shot(buffers: PushBuffers, x: Tensor, out: Tensor, stages: Sequence[str]) -> None:
    chunk, block = buffers.chunk(x.numel()), _block(x)
    two_shot_kernel[(triton.cdiv(chunk, block),)](
        *_exchange(buffers, x), x, out, x.numel(), chunk,
        REDUCE="reduce" in stages, **_flags(buffers, x, stages), BLOCK=block, num_warps=WARPS,
    )  # fmt: skip


def _does_one_shot(stages: Sequence[str]) -> bool:
    return "push" in stages or "collect" in stages


def _block(x: Tensor) -> int:
    """Elements of a program: one access of 16 bytes per thread."""
    return WARPS * 32 * 16 // x.itemsize


def _exchange(buffers: PushBuffers, x: Tensor) -> tuple[Any, ...]:
    slot = buffers.max_bytes // x.itemsize
    return buffers.ptrs, buffers.state, buffers.error, buffers.rank, slot, buffers.max_polls


def _flags(buffers: PushBuffers, x: Tensor, stages: Sequence[str]) -> dict[str, Any]:
    return {
        "WORLD": buffers.world_size,
        "PUSH": "push" in stages,
        "COLLECT": "collect" in stages,
        **options(x),
    }


def _check(x: Tensor, *others: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise PushRefused(f"dtype {x.dtype}; push sums {', '.join(map(str, DTYPES))}")
    for tensor in (x, *others):
        if tensor.dtype != x.dtype or tensor.shape[-1] != x.shape[-1] or not tensor.is_contiguous():
            raise ValueError(f"push takes contiguous tensors of one dtype, got {tensor.dtype} {list(tensor.shape)}")
