"""Finds a model's kernels and compiles them on all cores."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rapid_infer.device import GpuInfo, assume_gpu
from rapid_infer.ops.precompile import driver
from rapid_infer.ops.precompile.crew import Crew, Job
from rapid_infer.ops.precompile.launches import Launch, collect_launches
from rapid_infer.profiling import span

LARGE = 7_000
"""Characters of a kernel that takes seconds to compile: it gets a process as soon as it is found."""


def compile_kernels(
    gpu: GpuInfo, run: Callable[[], object], parent: socket.socket, show: Callable[[int, int], object]
) -> list[str]:
    """Compile for `gpu` all kernels that `run` would launch, whose tensors may lie on "meta"; returns the names of
    their folders in Triton's cache.

    `show` is called with how many are done, of how many. RuntimeError when some could not be compiled, EOFError when
    `parent` has gone, see `Crew`.
    """
    assume_gpu(gpu)
    driver.compile_for(gpu)
    later: list[Launch] = []
    with tempfile.TemporaryDirectory() as folder, Crew(parent) as crew:
        claims = Path(folder) if driver.can_link() else None

        def take(launch: Launch) -> None:
            if launch.size >= LARGE:
                crew.start([partial(launch.compile, claims)], 1)
            else:
                later.append(launch)

        with span("planning"), collect_launches(take):
            run()
        with span("compiling"):
            later.sort(key=lambda launch: (-launch.size, launch.name))
            jobs: list[Job] = [partial(launch.compile, claims) for launch in later]
            crew.start(jobs if claims is None else [driver.compile_driver, *jobs], len(os.sched_getaffinity(0)))
            names: dict[str, None] = {}
            show(0, crew.total)
            for name in crew.results():
                names[name] = None
                show(len(crew.done), crew.total)
    if crew.failed:
        why = "; ".join(crew.failed.values())
        raise RuntimeError(f"{len(crew.failed)} of {crew.total} kernels were not compiled: {why:.500}")
    return sorted(filter(None, names))
