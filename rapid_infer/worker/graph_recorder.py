"""Recording of CUDA graphs: all in one memory pool, none half done without an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

from rapid_infer.ops.registry import OpResolver

T = TypeVar("T")


class Recorder(Protocol):
    """What records the runs of a `GraphRunner`."""

    def record(
        self, what: str, run: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, T]: ...

    def release_unused(self) -> None: ...


class GraphRecorder:
    """Graphs that it records must be replayed one after another: they share memory for what they do not return.

    `ops` is named in errors: what the user has pinned may be what cannot be recorded.
    """

    def __init__(self, device: torch.device, ops: OpResolver) -> None:
        self._ops = ops
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._cancelled: list[torch.cuda.CUDAGraph] = []

    def record(
        self, what: str, run: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what `run` launches, and what it returned. RuntimeError, naming `what`, when that fails.

        `warm_up`, or `run` itself, is executed first and waited for: kernels are compiled and workspaces allocated
        there; during a recording neither is allowed.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                (warm_up or run)()
                self._stream.synchronize()
                result = self._capture(graph, run)
        except Exception as error:
            raise capture_failure(what, error, self._ops) from error
        current.wait_stream(self._stream)
        return graph, result

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], T]) -> T:
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = run()
            graph.capture_end()
        except BaseException:
            self._discard(graph)
            raise
        return result

    def _discard(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, and give back its memory. What comes next is recorded in a new pool."""
        pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
        try:
            graph.capture_end()
        except Exception:
            # CUDA has cancelled the capture, and torch still counts the pool as one that is recorded to. For pinned
            # memory it goes on asking this graph, which has to stay for that.
            self._cancelled.append(graph)
            with suppress(Exception):
                device = torch.cuda.current_device()
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
        with suppress(Exception):
            graph.reset()

    def release_unused(self) -> None:
        """Give back what warming up has left: it belongs to the recorder's stream, and no later step could use it."""
        torch.cuda.empty_cache()


def capture_failure(what: str, error: Exception, ops: OpResolver) -> RuntimeError:
    pinned = f"; op_priority chose {', '.join(ops.pinned)}" if ops.pinned else ""
    return RuntimeError(
        f"recording the CUDA graph for the {what} failed with {type(error).__name__}: {error}; "
        f"enforce_eager=True runs without graphs{pinned}"
    )
