"""The providers of collectives that a rank can try, the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from rapid_infer.parallel.bus import SharedMemory
from rapid_infer.parallel.comm import Comm
from rapid_infer.parallel.process_group import GroupComm
from rapid_infer.parallel.shm import ShmComm


def _push(device: torch.device, larger: Callable[[], Comm] | None, entered: Callable[[], object]) -> Comm:
    from rapid_infer.parallel.push_comm import PushComm

    return PushComm.meet(device, None if larger is None else larger(), entered)


def candidates(
    device: torch.device, rank: int, size: int, memory_fd: int, entered: Callable[[], object]
) -> Mapping[str, Callable[[], Comm]]:
    """By name. `memory_fd`: of `ShmComm.bytes_needed(size)` bytes that the ranks share."""
    if device.type == "cuda":
        found: dict[str, Callable[[], Comm]] = {}
        if dist.is_nccl_available() and torch.cuda.device_count() >= size:
            found["nccl"] = partial(GroupComm, size, "nccl", entered)
        push = partial(_push, device, found.get("nccl"), entered)
        return {"push": push, **found, "gloo": partial(GroupComm, size, "gloo", entered)}
    return {
        "shm": lambda: ShmComm(SharedMemory(ShmComm.bytes_needed(size), memory_fd), rank, size, entered),
        "gloo": partial(GroupComm, size, "gloo", entered),
    }
