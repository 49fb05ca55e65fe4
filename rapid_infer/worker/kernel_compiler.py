"""Lets a process beside this one compile a model's kernels on all cores while the model is loaded. Imports no torch."""

from __future__ import annotations

import logging
import os
import select
import subprocess
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
from rapid_infer.processes.launch import start_module
from rapid_infer.registry import Entry
from rapid_infer.worker.compile_process import Progress, Start, Target
from rapid_infer.worker.kernel_cache import KernelList, hash_triton, use_kernel_cache

logger = logging.getLogger(__name__)

SILENCE = 300.0
"""Seconds without a word after which the process is given up: kernels are then compiled when they are launched."""

Show = Callable[[int, int], None]
"""Called with how many kernels are done, of how many."""


class KernelCompiler:
    """A context manager, to be entered as early as possible: its process begins to import what it needs.

    `aim` when options and GPU are known, `wait` before the first launch. There is no process where no GPU can be or all
    kernels are there. Nothing here makes a start fail: a kernel that was not compiled beforehand is compiled when it is
    first launched.
    """

    def __init__(self, checkpoint: Path, entry: Entry, args: EngineArgs) -> None:
        self._entry, self._checkpoint = entry, checkpoint
        self._process: subprocess.Popen[bytes] | None = None
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
        if self._process is not None:
            _send(self._process, _target(config, model_config, gpu))

    def wait(self, progress: Callable[[], AbstractContextManager[Show]]) -> Progress:
        """Until all kernels are there, at once if they are. Returns how far it came, and the error if there was one."""
        last = Progress()
        if self._process is None:
            return last
        began = time.perf_counter()
        try:
            with progress() as show:
                for word in _words(self._process):
                    last = word if word.error is None else msgspec.structs.replace(last, error=word.error)
                    show(last.done, last.total)
        finally:
            self.stop()
        if last.error is not None:
            logger.warning(
                "kernels are compiled one after another, when they are first launched, since compiling them beforehand "
                "failed: %s",
                last.error,
            )
        took = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in last.seconds.items()) or "failed"
        waited = time.perf_counter() - began
        logger.info("waited %.1f s for %d kernels to be compiled (%s)", waited, last.total, took)
        return last

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            process, self._process = self._process, None
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                # What the process did not live to take is of no interest.
                with suppress(OSError):
                    pipe.close()
            process.kill()
            process.wait()

    def _spawn(self, kernels: KernelList) -> None:
        # Without a GPU to see, nothing imported there can open one, which would take its memory. A session of its own
        # keeps a terminal's Ctrl-C away.
        module, env = "rapid_infer.worker.compile_process", {"CUDA_VISIBLE_DEVICES": ""}
        pipe = subprocess.PIPE
        try:
            self._process = start_module(module, env=env, stdin=pipe, stdout=pipe, start_new_session=True)
        except OSError as error:
            logger.warning("kernels are compiled when they are first launched: no process could be started: %s", error)
            return
        start = Start(str(self._checkpoint), self._entry.target, str(kernels.cache), kernels.key)
        _send(self._process, start)


def _target(config: EngineConfig, model_config: Any, gpu: GpuInfo) -> Target:
    kind = type(model_config)
    try:
        packed = msgspec.json.encode(model_config)
        whole = msgspec.json.decode(packed, type=kind) == model_config
    except (TypeError, ValueError, msgspec.MsgspecError):
        whole = False
    if not whole:
        return Target(config, gpu)
    return Target(config, gpu, f"{kind.__module__}:{kind.__qualname__}", msgspec.Raw(packed))


def _send(process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
    """To a process that may have ended; `_words` finds that and says why."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(msgspec.json.encode(message) + b"\n")
        process.stdin.flush()


def _words(process: subprocess.Popen[bytes]) -> Iterator[Progress]:
    """What the process says, until it ends."""
    assert process.stdout is not None
    rest = b""
    while True:
        if not select.select([process.stdout], [], [], SILENCE)[0]:
            yield Progress(error=f"no kernel in {SILENCE:.0f} s")
            return
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=Progress)
            except msgspec.MsgspecError:
                yield Progress(error=f"the process said {line[:100]!r}")
                return
    if process.wait() not in (0, 1):
        yield Progress(error=f"the process ended with exit code {process.returncode}")


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
