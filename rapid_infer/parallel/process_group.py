"""torch's process groups: how ranks find each other, and the collectives over gloo (CPU) and NCCL (GPUs)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rapid_infer.parallel.comm import PlainComm, ordered_sum

TIMEOUT = timedelta(hours=12)
"""Of a collective. Who is stuck is found and ended by the process that started the ranks, which also says why."""


def host_store(ranks: int) -> dist.TCPStore:
    """For the process that starts the ranks: they connect to its `port` on this host, which is free for sure."""
    return dist.TCPStore("127.0.0.1", 0, ranks + 1, is_master=True, wait_for_workers=False)


def join(host: str, port: int, rank: int, size: int, device: torch.device) -> None:
    """Become `rank` of `size`. Blocks until all are there."""
    store = dist.TCPStore(host, port, size + 1, is_master=False, wait_for_workers=False)
    on_gpu = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


class GroupComm(PlainComm):
    """Over the default process group. gloo adds in an order of its own, so that every rank gathers and adds itself."""

    def __init__(self, size: int, backend: str, entered: Callable[[], object] = lambda: None) -> None:
        self.name, self._size, self._entered = backend, size, entered
        # gloo copies to the host and waits.
        self.capturable = backend == "nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.name == "nccl":
            self._entered()
            dist.all_reduce(x := x.contiguous())
            return x
        return ordered_sum(self.all_gather(x), x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        self._entered()
        x = x.contiguous()
        out = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        if self.name == "nccl":
            dist.all_gather_into_tensor(out, x)
        else:
            dist.all_gather(list(out.unbind(0)), x)
        return out


def agree(yes: bool) -> bool:
    """Whether every rank says yes."""
    vote = torch.tensor([int(yes)])
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())
