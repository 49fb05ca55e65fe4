"""Finds out which kernels a model needs, and compiles them: `python -m` this module, with its end of a socket.

It takes `Start` and, when that is known, `Target`, and answers with `Progress`, all in JSON. It never touches a GPU, so
that it may fork once all is imported: its children compile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rapid_infer.config import EngineConfig
from rapid_infer.device import GpuInfo
from rapid_infer.hub.cache import file_lock
from rapid_infer.ops.precompile.cache import KernelList, hash_triton
from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import take_over
from rapid_infer.profiling import durations, span
from rapid_infer.registry import load_target


class Start(msgspec.Struct):
    """The model: its directory and its class, and where its list of kernels goes.

    `dry_run`, "module:function", is called with class, directory, engine's configuration and the model's, or None, and
    launches on "meta" all kernels that the model's steps can launch.
    """

    checkpoint: str
    target: str
    dry_run: str
    cache: str
    key: str


class Target(msgspec.Struct):
    """What to compile for.

    `model_config`: what the plugin's `read_config` gives, of type `config_type`, "module:Class"; without it the dry run
    reads it itself, for which it must import transformers.
    """

    config: EngineConfig
    gpu: GpuInfo
    config_type: str | None = None
    model_config: msgspec.Raw = msgspec.Raw()


class Progress(msgspec.Struct, omit_defaults=True):
    """`done` of `total` kernels are there. The last one has `error`, why no more will be, or `seconds`, how long what
    took.
    """

    done: int = 0
    total: int = 0
    error: str | None = None
    seconds: dict[str, float] | None = None


def main(fd: int) -> None:
    channel = Channel(take_over(fd))
    # What a library prints is no output of whoever started this.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(progress: Progress) -> None:
        channel.send(msgspec.json.encode(progress))

    try:
        last = _compile(channel, say)
    except Exception as error:
        last = Progress(error=f"{type(error).__name__}: {error}")
    # Whoever waited for this may be gone.
    with suppress(OSError):
        say(last)


def _compile(channel: Channel, say: Callable[[Progress], object]) -> Progress:
    """Returns the last word. EOFError when nobody waits for the kernels any more."""
    start = msgspec.json.decode(_next(channel), type=Start)
    with durations() as spans:
        with span("imports"):
            # While the engine finds out about its GPU. Forked processes need the hash as well, and no other thread.
            hashing = hash_triton()
            from rapid_infer.ops.precompile import prepare
            from rapid_infer.ops.precompile.compile import compile_kernels

            dry_run: Any = load_target(start.dry_run)
            prepare.import_all()
            hashing.join()
            cls = load_target(start.target)
        with span("waiting for the configuration"):
            target = msgspec.json.decode(_next(channel), type=Target)
        kernels, total = KernelList(Path(start.cache), start.key), 0

        def show(done: int, of: int) -> None:
            nonlocal total
            total = of
            say(Progress(done, of))

        with file_lock(kernels.lock):
            # Another process may have done it meanwhile.
            if not kernels.complete(target.gpu):
                run = partial(dry_run, cls, Path(start.checkpoint), target.config, _model_config(target))
                kernels.write(target.gpu, compile_kernels(target.gpu, run, channel.sock, show))
    return Progress(total, total, seconds={one.name: one.seconds for one in spans if not one.depth})


def _next(channel: Channel) -> bytes:
    payload = channel.receive()
    if payload is None:
        raise EOFError("nobody waits for kernels any more")
    return payload


def _model_config(target: Target) -> Any:
    if target.config_type is None:
        return None
    return msgspec.json.decode(target.model_config, type=load_target(target.config_type))


if __name__ == "__main__":
    main(int(sys.argv[1]))
