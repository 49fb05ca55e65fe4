"""Ranks simulated on one GPU, each with a stream, whose kernels wait for each other.

All programs of all ranks' current calls must be resident together, and a host that waits for one rank's kernel before
it has launched the others' waits in vain: nothing is compiled, loaded or allocated while kernels wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from push_cases import EPS, WORDS, at_rest, fp32_sum, mixed

from rapid_infer.ops.providers.triton.norm import fused_add_rms_norm
from rapid_infer.parallel import push
from rapid_infer.parallel.push import PushBuffers

MAX_POLLS = 1 << 20
"""Seconds, so that ranks that block each other end as an error."""
VARIANTS = 4


class Ranks:
    def __init__(self, world_size: int, max_bytes: int) -> None:
        self.buffers = PushBuffers.simulated(world_size, max_bytes, "cuda")
        self.streams = [torch.cuda.Stream() for _ in self.buffers]
        self.variant = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in self.buffers]
        self.different = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in self.buffers]

    def warm_up(self, run: Callable[[int], object]) -> None:
        """Compile and load all that `run(rank)` launches, without a wait, and start over."""
        for rank, buffers in enumerate(self.buffers):
            buffers.max_polls = 1
            with torch.cuda.stream(self.streams[rank]):
                run(rank)
                torch.cuda.synchronize()
        for rank, buffers in enumerate(self.buffers):
            buffers.max_polls = MAX_POLLS
            for tensor in (buffers.memory, buffers.state, buffers.error, self.variant[rank], self.different[rank]):
                tensor.zero_()
        torch.cuda.synchronize()

    def capture(self, run: Callable[[int], object]) -> list[torch.cuda.CUDAGraph]:
        graphs = []
        for rank, stream in enumerate(self.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                run(rank)
            graphs.append(graph)
        return graphs

    def check(self) -> None:
        """Wait, and see that all ranks found what they wanted."""
        torch.cuda.synchronize()
        assert [int(buffers.error) for buffers in self.buffers] == [0] * len(self.buffers)
        assert [int(different) for different in self.different] == [0] * len(self.buffers)
        assert at_rest(self.buffers)


class Call:
    """A call of `kind` "sum", "two_shot" or "norm" with VARIANTS inputs in turn, so that what one call left behind is
    not what the next one wants.
    """

    def __init__(self, kind: str, world_size: int, rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(n: int) -> torch.Tensor:
            if kind == "norm":
                return torch.randn(n, size, generator=generator).to("cuda", dtype)
            return mixed(n, size, dtype, "cuda", generator)

        self.kind = kind
        self.xs = [draw(VARIANTS * rows).view(VARIANTS, rows, size) for _ in range(world_size)]
        self.residual, self.weight = (torch.randn(n, size, generator=generator).to("cuda", dtype) for n in (rows, 1))
        total = fp32_sum(self.xs)
        self.want = [torch.where(total == 0, 0, total)]
        if kind == "norm":
            pairs = [fused_add_rms_norm(one, self.residual.clone(), self.weight[0], EPS) for one in self.want[0]]
            self.want = [torch.stack(list(each)) for each in zip(*pairs)]

    def launch(self, buffers: PushBuffers, x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.empty_like(x)
        if self.kind == "norm":
            added = torch.empty_like(x)
            push.push_all_reduce_add_rms_norm(buffers, x, self.residual, self.weight[0], EPS, out, added)
            return [out, added]
        limit = buffers.one_shot_bytes
        buffers.one_shot_bytes = 0 if self.kind == "two_shot" else limit
        push.push_all_reduce(buffers, x, out)
        buffers.one_shot_bytes = limit
        return [out]


def run_calls(ranks: Ranks, rank: int, calls: list[Call]) -> None:
    """The calls one directly after the other, so that with programmatic launch their kernels overlap; then compare."""
    variant = ranks.variant[rank]
    variant.add_(1).remainder_(VARIANTS)
    xs = [call.xs[rank].index_select(0, variant)[0] for call in calls]
    found = [call.launch(ranks.buffers[rank], x) for call, x in zip(calls, xs)]
    for call, outs in zip(calls, found):
        for out, every in zip(outs, call.want):
            want = every.index_select(0, variant)[0]
            word = WORDS[out.itemsize]
            ranks.different[rank] += ((out.view(word) != want.view(word)) & ~(out.isnan() & want.isnan())).sum()
