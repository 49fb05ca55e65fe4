"""Finds out which kernels a model needs, and compiles them on all cores: `python -m` this module.

It takes two lines of JSON, `Start` and, when that is known, `Target`, and answers in lines of JSON (`Progress`); it
ends when its input does. It never touches a GPU, so that it may fork once all is imported: its children compile.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from rapid_infer.config import EngineConfig
from rapid_infer.device import GpuInfo, assume_gpu
from rapid_infer.hub.cache import file_lock
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.registry import load_target
from rapid_infer.worker.kernel_cache import KernelList, hash_triton

if TYPE_CHECKING:
    from rapid_infer.ops.providers.triton.precompile import Launch

Job = Callable[[], str]

LARGE = 7_000
"""Characters of a kernel that takes seconds to compile: it gets a process as soon as it is found."""


class Start(msgspec.Struct):
    """The model: its directory and its class, and where its list of kernels goes."""

    checkpoint: str
    target: str
    cache: str
    key: str


class Target(msgspec.Struct):
    """What to compile for.

    `model_config`: what the plugin's `read_config` gives, of type `config_type`, "module:Class"; without it the process
    reads it itself, for which it must import transformers.
    """

    config: EngineConfig
    gpu: GpuInfo
    config_type: str | None = None
    model_config: msgspec.Raw = msgspec.Raw()


class Progress(msgspec.Struct, omit_defaults=True):
    """`done` of `total` kernels are there; `error`: why no more will be; `seconds`: how long what took, at the end."""

    done: int = 0
    total: int = 0
    error: str | None = None
    seconds: dict[str, float] = {}


def main() -> int:
    # A terminal's Ctrl-C is the parent's to handle: when it goes, so does our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints is none of our answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(progress: Progress) -> None:
        answers.write(msgspec.json.encode(progress) + b"\n")

    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    clock = _Clock()
    try:
        prepared = _prepare(start)
        clock.mark("imports")
        line = sys.stdin.buffer.readline()
        if not line:
            return 0
        clock.mark("waiting for the configuration")
        target = msgspec.json.decode(line, type=Target)
        kernels = KernelList(Path(start.cache), start.key)
        with file_lock(kernels.lock):
            # Another process may have done it meanwhile.
            if not kernels.complete(target.gpu):
                _compile_all(prepared, target, kernels, say, clock)
    except Exception as error:
        say(Progress(error=f"{type(error).__name__}: {error}"))
        return 1
    return 0


class _Clock:
    """How long what took, in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def mark(self, what: str) -> None:
        """All since the last mark was `what`."""
        now = time.perf_counter()
        self.seconds[what], self._last = now - self._last, now


def _prepare(start: Start) -> tuple[Any, Checkpoint]:
    """Import all there is to import, while the parent finds out about its GPU."""
    hashing = hash_triton()
    import torch
    import triton.backends.nvidia.compiler
    import triton.compiler  # noqa: F401

    from rapid_infer.ops.registry import OPS, load_providers
    from rapid_infer.worker import kernel_plan  # noqa: F401

    # No pool of threads that a fork would cut off.
    torch.set_num_threads(1)
    import_dynamo_when_needed()
    load_providers()
    for provider in (provider for op in OPS.values() for provider in op.providers.values()):
        if isinstance(provider.target, str) and ".triton." in provider.target:
            _ = provider.fn
    # For the first choice on "meta" torch imports hundreds of modules.
    torch.where(torch.empty(1, device="meta") > 0, 1.0, 0.0)
    # Forked processes need the hash as well, and must find no other thread.
    hashing.join()
    return load_target(start.target), read_checkpoint(Path(start.checkpoint))


def import_dynamo_when_needed() -> None:
    """Operators on "meta" import torch._dynamo to say that it is to leave them alone, which takes two seconds.

    A module in its place answers that, and gives way to the real one as soon as anything else is asked of it.
    """
    import torch

    name = "torch._dynamo"
    if name in sys.modules:
        return
    place = ModuleType(name)

    def real(attribute: str) -> Any:
        if sys.modules.get(name) is place:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    vars(place).update(disable=lambda fn, *args, **kwargs: fn, __getattr__=real)
    sys.modules[name] = torch._dynamo = place


def _model_config(target: Target, cls: Any, checkpoint: Checkpoint) -> Any:
    if target.config_type is None:
        return cls.read_config(checkpoint.hf_config)
    return msgspec.json.decode(target.model_config, type=load_target(target.config_type))


def _compile_all(
    prepared: tuple[Any, Checkpoint],
    target: Target,
    kernels: KernelList,
    say: Callable[[Progress], None],
    clock: _Clock,
) -> None:
    from rapid_infer.ops.providers.triton import precompile
    from rapid_infer.worker.kernel_plan import plan_kernels

    cls, checkpoint = prepared
    model_config = _model_config(target, cls, checkpoint)
    assume_gpu(target.gpu)
    precompile.compile_for(target.gpu)
    later: list[Launch] = []
    with tempfile.TemporaryDirectory() as folder, Crew() as crew:
        claims = Path(folder) if precompile.can_link() else None

        def take(launch: Launch) -> None:
            if launch.size >= LARGE:
                crew.start([partial(launch.compile, claims)], 1)
            else:
                later.append(launch)

        plan_kernels(cls, model_config, checkpoint, _with_known_providers(target.config), take)
        clock.mark("planning")
        later.sort(key=lambda launch: (-launch.size, launch.name))
        jobs: list[Job] = [partial(launch.compile, claims) for launch in later]
        crew.start(jobs if claims is None else [precompile.compile_driver, *jobs], len(os.sched_getaffinity(0)))
        names: dict[str, None] = {}
        say(Progress(0, crew.total))
        for name in crew.results():
            names[name] = None
            say(Progress(len(crew.done), crew.total))
    if crew.failed:
        why = "; ".join(crew.failed.values())
        raise RuntimeError(f"{len(crew.failed)} of {crew.total} kernels were not compiled: {why:.500}")
    kernels.write(target.gpu, sorted(filter(None, names)))
    clock.mark("compiling")
    say(Progress(len(crew.done), crew.total, seconds=clock.seconds))


def _with_known_providers(config: EngineConfig) -> EngineConfig:
    """Without those that only the engine's process has registered: the kernels of all other operators are the same."""
    from rapid_infer.ops.registry import OPS

    known = tuple(
        (op, tuple(name for name in names if name in OPS[op].providers))
        for op, names in config.op_priority
        if op in OPS
    )
    return replace(config, op_priority=known)


class Crew:
    """Forked processes that work off jobs. A context manager, which ends them.

    `done` holds the numbers of jobs that are done, `failed` why others are not.
    """

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._children: list[int] = []
        self._pipe = os.pipe()
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    @property
    def total(self) -> int:
        return len(self._jobs)

    def start(self, jobs: Sequence[Job], processes: int) -> None:
        """Let new processes work off these jobs in their order, each taking the next one when it is done with one."""
        first = len(self._jobs)
        self._jobs += jobs
        self._work_off(range(first, len(self._jobs)), processes)

    def results(self) -> Iterator[str]:
        """What each job returned, as it ends. One that failed, or whose process died, is tried once more, since memory
        may have been short. EOFError when our parent has gone.
        """
        yield from self._answers()
        missing = [number for number in range(self.total) if number not in self.done]
        if missing:
            self._pipe = os.pipe()
            self._work_off(missing, 1)
            yield from self._answers()
        for number in range(self.total):
            if number not in self.done:
                self.failed.setdefault(number, "its process died")

    def _work_off(self, numbers: Sequence[int], processes: int) -> None:
        todo, fill = os.pipe()
        os.write(fill, b"".join(struct.pack("<I", number) for number in numbers))
        os.close(fill)
        for _ in range(min(processes, len(numbers))):
            child = os.fork()
            if not child:
                self._work(todo)
            self._children.append(child)
        os.close(todo)

    def _work(self, todo: int) -> None:
        parent = os.getppid()
        os.nice(5)
        while (packed := os.read(todo, 4)) and os.getppid() == parent:
            [number] = struct.unpack("<I", packed)
            try:
                answer = (number, True, self._jobs[number]())
            except BaseException as error:
                answer = (number, False, f"{type(error).__name__}: {error}"[:1000])
            os.write(self._pipe[1], msgspec.json.encode(answer) + b"\n")
        os._exit(0)

    def _answers(self) -> Iterator[str]:
        read, write = self._pipe
        os.close(write)
        rest = b""
        while True:
            ready, _, _ = select.select([read, sys.stdin], [], [])
            if read not in ready:
                raise EOFError("nobody waits for these kernels any more")
            piece = os.read(read, 1 << 16)
            if not piece:
                os.close(read)
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                number, done, text = msgspec.json.decode(line, type=tuple[int, bool, str])
                if done:
                    self.done.add(number)
                    self.failed.pop(number, None)
                    yield text
                else:
                    self.failed[number] = text


if __name__ == "__main__":
    sys.exit(main())
