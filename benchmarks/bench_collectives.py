"""All-reduce by stores into peers' memory, on one GPU with simulated ranks: everything but the wire."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch

EXAMPLES = """\
What it does: gives each simulated rank a workspace, a stream and a CUDA graph of many calls, replays the graphs of all
ranks at once, so that their kernels wait for each other, and divides the time by the number of calls. An ordinary
kernel that writes x goes before every few calls; it is in all columns. The kernels between two of those are launched
programmatically, unless --ordinary is given.

Read a line so: `norm` is residual add + RMSNorm alone, on one stream; `fused` the sum with that in one kernel; `+` what
fusing the sum into it costs. `sum` and `two-shot` are the sum alone. All are us per call.

examples
  on an H200, a minute:
    CUDA_DEVICE_MAX_CONNECTIONS=32 python benchmarks/bench_collectives.py
  two ranks, a row of 4096:
    CUDA_DEVICE_MAX_CONNECTIONS=32 python benchmarks/bench_collectives.py --ranks 2 --kib 8
"""
EPS = 1e-6
RESIDENT = 128
"""Programs of all ranks and all calls that overlap: a kernel whose peer finds no room would wait in vain. The fused one
of eight ranks has a multiprocessor to itself.
"""


class Case:
    """One message size for `world_size` ranks."""

    def __init__(self, world_size: int, rows: int, hidden: int, dtype: torch.dtype, calls: int) -> None:
        from rapid_infer.parallel.push import PushBuffers

        size = rows * hidden * dtype.itemsize
        self.buffers = PushBuffers.simulated(world_size, max(size, 1024), "cuda")
        for buffers in self.buffers:
            buffers.one_shot_bytes = buffers.max_bytes
        self.streams = [torch.cuda.Stream() for _ in self.buffers]
        self.calls = calls
        self.overlap = max(1, min(8, RESIDENT // (world_size * rows)))
        self.source = torch.randn(rows, hidden, device="cuda").to(dtype)
        self.weight = torch.ones(hidden, device="cuda", dtype=dtype)
        self.x, self.residual, self.out, self.added = (
            [self.source.clone() for _ in self.buffers] for _ in range(4)
        )  # fmt: skip

    def norm(self, rank: int) -> None:
        from rapid_infer.ops.providers.triton.norm import fused_add_rms_norm

        fused_add_rms_norm(self.x[rank], self.residual[rank], self.weight, EPS)

    def fused(self, rank: int) -> None:
        from rapid_infer.parallel.push import push_all_reduce_add_rms_norm

        x, residual, out, added = self.x[rank], self.residual[rank], self.out[rank], self.added[rank]
        push_all_reduce_add_rms_norm(self.buffers[rank], x, residual, self.weight, EPS, out, added)

    def sum(self, rank: int) -> None:
        from rapid_infer.parallel.push import push_all_reduce

        push_all_reduce(self.buffers[rank], self.x[rank], self.out[rank])

    def two_shot(self, rank: int) -> None:
        buffers = self.buffers[rank]
        buffers.one_shot_bytes = 0
        self.sum(rank)
        buffers.one_shot_bytes = buffers.max_bytes

    def time(self, call: Callable[[int], None], ranks: int, repeats: int) -> float:
        """Microseconds per call, the median of `repeats`, where the first `ranks` ranks make it."""
        polls = self.buffers[0].max_polls
        for rank in range(ranks):
            # What is compiled or loaded while a kernel waits may wait for it.
            self.buffers[rank].max_polls = 1
            with torch.cuda.stream(self.streams[rank]):
                call(rank)
                self.x[rank].copy_(self.source)
                torch.cuda.synchronize()
        for buffers in self.buffers:
            buffers.max_polls = min(polls, 1 << 22)
            for tensor in (buffers.memory, buffers.state, buffers.error):
                tensor.zero_()
        torch.cuda.synchronize()
        graphs = [self._record(call, rank) for rank in range(ranks)]
        times = [self._replay(graphs) for _ in range(repeats + 1)][1:]
        if any(buffers.error.any() for buffers in self.buffers):
            sys.exit(
                "ranks waited for each other in vain: do all streams run at once (CUDA_DEVICE_MAX_CONNECTIONS=32)?"
            )
        return statistics.median(times) / self.calls

    def _record(self, call: Callable[[int], None], rank: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.streams[rank]):
            for n in range(self.calls):
                if n % self.overlap == 0:
                    self.x[rank].copy_(self.source)
                call(rank)
        return graph

    def _replay(self, graphs: list[torch.cuda.CUDAGraph]) -> float:
        """Microseconds of one replay of all, begun together."""
        start, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1))
        torch.cuda._sleep(2_000_000)
        start.record()
        for graph, stream, end in zip(graphs, self.streams, ends):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                graph.replay()
                end.record()
        torch.cuda.synchronize()
        return max(start.elapsed_time(end) for end in ends) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kib", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help="bytes of a message")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--calls", type=int, default=96, help="in a graph")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ordinary", action="store_true", help="no programmatic launch")
    ns = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    from rapid_infer.ops.providers.triton import norm
    from rapid_infer.parallel import push

    if ns.ordinary:
        for module in (norm, push):
            module.options = lambda x: {"PDL": False}
    dtype = getattr(torch, ns.dtype)
    print(
        f"{'ranks':>5} {'KiB':>5} {'rows':>5} {'norm':>8} {'fused':>8} {'+':>8} {'sum':>8} {'two-shot':>8}", flush=True
    )
    for world_size in ns.ranks:
        for kib in ns.kib:
            rows = max(1, kib * 1024 // (ns.hidden * dtype.itemsize))
            if world_size * rows > RESIDENT:
                print(f"{world_size:>5} {kib:>5} {rows:>5}  too many programs to run at once", flush=True)
                continue
            case = Case(world_size, rows, ns.hidden, dtype, ns.calls)
            alone = case.time(case.norm, 1, ns.repeats)
            fused = case.time(case.fused, world_size, ns.repeats)
            total = case.time(case.sum, world_size, ns.repeats)
            two_shot = case.time(case.two_shot, world_size, ns.repeats)
            figures = (alone, fused, fused - alone, total, two_shot)
            print(f"{world_size:>5} {kib:>5} {rows:>5} " + " ".join(f"{us:>8.2f}" for us in figures), flush=True)


if __name__ == "__main__":
    main()
