"""Lets a process beside this one compile a model's kernels on all cores while the model is loaded. Imports no torch."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from rapid_infer.config import EngineArgs, EngineConfig
from rapid_infer.device import GpuInfo
from rapid_infer.ops.precompile.cache import KernelList, hash_triton, use_kernel_cache
from rapid_infer.ops.precompile.process import Progress, Start, Target
from rapid_infer.processes.channel import Channel, FrameError
from rapid_infer.processes.launch import ChildProcess
from rapid_infer.registry import Entry

logger = logging.getLogger(__name__)

SILENCE = 300.0
"""Seconds without a word after which the process is given up: kernels are then compiled when they are launched."""

Show = Callable[[int, int], None]
"""Called with how many kernels are done, of how many."""


class KernelCompiler:
    """A context manager, to be entered as early as possible: its process begins to import what it needs.

    `aim` when the options are decided, `wait` before the first launch. There is no process where no GPU can be or all
    kernels are there. Nothing here makes a start fail: a kernel that was not compiled beforehand is compiled when it is
    first launched.
    """

    def __init__(self, checkpoint: Path, entry: Entry, args: EngineArgs, dry_run: str) -> None:
        """`dry_run` names a function that launches all kernels, see `Start`."""
        self._entry, self._checkpoint, self._dry_run = entry, checkpoint, dry_run
        self._process: ChildProcess | None = None
        self.kernels: KernelList | None = None
        if args.device.partition(":")[0] in ("auto", "cuda") and _gpu_may_be_here():
            self.kernels = KernelList.of(use_kernel_cache(), checkpoint, entry, args)

    def __enter__(self) -> KernelCompiler:
        if self.kernels is not None:
            if not self.kernels.complete():
                self._spawn(self.kernels)
            # Whoever needs Triton and cannot import it says so.
            with suppress(ImportError, OSError):
                hash_triton()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    def aim(self, config: EngineConfig, model_config: Any, gpu: GpuInfo | None) -> None:
        """Say what to compile for; `gpu` None: the engine runs elsewhere."""
        if gpu is None or self.kernels is None or self.kernels.complete(gpu):
            self.stop()
            return
        if self._process is None:
            self._spawn(self.kernels)
        self._send(_target(config, model_config, gpu))

    def wait(self, progress: Callable[[], AbstractContextManager[Show]]) -> Progress:
        """Until all kernels are there, at once if they are. Returns how far it came, and the error if there was one."""
        last = Progress()
        if self._process is None:
            return last
        began = time.perf_counter()
        try:
            with progress() as show:
                for last in _words(self._process):
                    show(last.done, last.total)
        finally:
            self.stop()
        if last.error is not None:
            logger.warning(
                "kernels are compiled one after another, when they are first launched, since compiling them beforehand "
                "failed: %s",
                last.error,
            )
        took = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in (last.seconds or {}).items()) or "failed"
        waited = time.perf_counter() - began
        logger.info("waited %.1f s for %d kernels to be compiled (%s)", waited, last.total, took)
        return last

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            process, self._process = self._process, None
            process.stop(grace=0)

    def _spawn(self, kernels: KernelList) -> None:
        # Without a GPU to see, nothing imported there can open one, which would take its memory.
        env = {"CUDA_VISIBLE_DEVICES": ""}
        try:
            self._process = ChildProcess("the compiling process", "rapid_infer.ops.precompile.process", env=env)
        except OSError as error:
            logger.warning("kernels are compiled when they are first launched: no process could be started: %s", error)
        target = self._entry.target
        self._send(Start(str(self._checkpoint), target, self._dry_run, str(kernels.cache), kernels.key))

    def _send(self, message: Start | Target) -> None:
        """To a process that may have ended; `_words` finds that and says why."""
        if self._process is not None:
            with suppress(OSError):
                Channel(self._process.sock).send(msgspec.json.encode(message))


def _target(config: EngineConfig, model_config: Any, gpu: GpuInfo) -> Target:
    kind = type(model_config)
    with suppress(TypeError, ValueError, msgspec.MsgspecError):
        packed = msgspec.json.encode(model_config)
        if msgspec.json.decode(packed, type=kind) == model_config:
            return Target(config, gpu, f"{kind.__module__}:{kind.__qualname__}", msgspec.Raw(packed))
    return Target(config, gpu)


def _words(process: ChildProcess) -> Iterator[Progress]:
    """What the process says, up to its last word; where it has none, an error says why."""
    channel, last = Channel(process.sock), Progress()
    try:
        while last.error is None and last.seconds is None:
            if not channel.wait(SILENCE):
                yield msgspec.structs.replace(last, error=f"no kernel in {SILENCE:.0f} s")
                return
            payload = channel.receive()
            if payload is None:
                raise EOFError
            last = msgspec.json.decode(payload, type=Progress)
            yield last
    except (OSError, EOFError):
        yield msgspec.structs.replace(last, error=process.how_it_ended())
    except (FrameError, msgspec.MsgspecError) as error:
        yield msgspec.structs.replace(last, error=f"{process.name} said what is no message: {error}")


def _gpu_may_be_here() -> bool:
    """Without asking CUDA, which takes a second and torch."""
    return (
        os.environ.get("TRITON_INTERPRET") != "1"
        and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
        and any((*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")))
        and find_spec("triton") is not None
    )


@contextmanager
def terminal_count() -> Iterator[Show]:
    """A bar on stderr; nothing when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling kernels", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
