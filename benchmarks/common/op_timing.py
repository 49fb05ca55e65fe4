"""Times calls of an op: inside a CUDA graph on a GPU, with the host's clock on a CPU; and what the device can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

Call = Callable[[], object]

COLD_BYTES = 200_000_000
"""So many bytes of other copies lie between two uses of one: more than any last-level cache holds."""
GRAPH_SECONDS = 2e-3
MAX_CALLS = 512


@dataclass(frozen=True)
class Peaks:
    """Measured on this device at the start of a run: of a large copy (read and written bytes) or sum (read ones), the
    faster of both, and of a square product.
    """

    bytes_per_s: float
    flops_per_s: float
    moved: str
    product: str


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, the median; `how` is "graph", "eager" (not capturable) or "host"; `calls` timed together."""

    seconds: float
    how: str
    calls: int


def copies_for(cold_bytes: int, device: str) -> int:
    """How many copies of a call's cold arguments to cycle over."""
    if not cold_bytes or device == "cpu":
        return 1
    return min(-(-COLD_BYTES // cold_bytes), 256)


def time_calls(
    calls: Sequence[Call], device: str, repeats: int, capture: bool = True, restores: Sequence[Call] = ()
) -> Timing:
    """Time `calls`, the same work on different copies, in turn. `capture`: put them in a CUDA graph if possible.

    `restores`, one for each call, run before it; their own time is measured alone and taken off.
    """
    if restores:
        both = time_calls([partial(_both, *pair) for pair in zip(restores, calls)], device, repeats, capture)
        alone = time_calls(restores, device, repeats, capture)
        return replace(both, seconds=max(both.seconds - alone.seconds, 1e-9))
    if device != "cuda":
        return _host(calls, repeats)
    if capture:
        try:
            return _graph(calls, repeats)
        except RuntimeError:
            # A call that asks the device something, such as a reference that reads lengths, cannot be captured.
            torch.cuda.synchronize()
    return _eager(calls, repeats)


def measure_peaks(device: str, dtype: torch.dtype, repeats: int) -> Peaks:
    """On a CPU with smaller operands, and in 16 bits with ones smaller still: few CPUs have arithmetic for them."""
    size, n = (1 << 30, 8192) if device == "cuda" else (1 << 26, 1024 if dtype == torch.float32 else 256)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = time_calls([lambda: target.copy_(source)], device, repeats)
    # A copy of bytes is the driver's own, and on an H200 a third slower than kernels that only read.
    read = time_calls([source.view(torch.float32).sum], device, repeats)
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    product = time_calls([lambda: torch.mm(a, b, out=out)], device, repeats)
    name = str(dtype).removeprefix("torch.")
    bytes_per_s = size * max(2 / copy.seconds, 1 / read.seconds)
    return Peaks(bytes_per_s, 2 * n**3 / product.seconds, f"{size >> 20} MiB", f"{n}^3 {name}")


def difference(got: object, want: object) -> float:
    """Norm of the difference over the norm of `want`; for integers the share that differs. Tuples: the largest."""
    if isinstance(got, tuple) and isinstance(want, tuple):
        return max(difference(a, b) for a, b in zip(got, want))
    assert isinstance(got, Tensor)
    assert isinstance(want, Tensor)
    if not want.is_floating_point():
        return float((got != want).float().mean())
    got, want = got.double() if got.numel() < 1 << 24 else got.float(), want.to(got.device)
    # Minus infinity marks what was cut off: it must stand in the same places.
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return float((finite != torch.isfinite(got)).float().mean())
    zero = torch.zeros((), dtype=got.dtype, device=got.device)
    error = torch.where(finite, got - want, zero).norm()
    return float(error / torch.where(finite, want.to(got.dtype), zero).norm().clamp_min(1e-30))


def _both(first: Call, second: Call) -> None:
    first()
    second()


def _host(calls: Sequence[Call], repeats: int) -> Timing:
    calls[0]()
    times = []
    for i in range(repeats):
        started = time.perf_counter()
        calls[i % len(calls)]()
        times.append(time.perf_counter() - started)
    return Timing(median(times), "host", 1)


def _eager(calls: Sequence[Call], repeats: int) -> Timing:
    calls[0]()
    times = [_elapsed(calls[i % len(calls)]) for i in range(repeats)]
    return Timing(median(times), "eager", 1)


def _graph(calls: Sequence[Call], repeats: int) -> Timing:
    # Compiling and autotuning must not happen while a graph is recorded.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2] * 3:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    once = min(_elapsed(calls[0]) for _ in range(3))
    rounds = max(1, min(round(GRAPH_SECONDS / once), MAX_CALLS) // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = [_elapsed(graph.replay) for _ in range(repeats)]
    return Timing(median(times) / (rounds * len(calls)), "graph", rounds * len(calls))


def _elapsed(call: Call) -> float:
    """Seconds of device time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
