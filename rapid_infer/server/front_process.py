"""One of several front processes: `python -m rapid_infer.server.front_process FD`, FD being its end of the supervisor's
socket. It shares port and engine with the others, and ends when the supervisor has gone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from rapid_infer.async_llm import AsyncLLM
from rapid_infer.ipc.attached import AttachedEngine
from rapid_infer.ipc.messages import Ready
from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import take_over
from rapid_infer.server.metrics import Metrics
from rapid_infer.server.run import front, leave_out_torch, listen, run, set_up_logging
from rapid_infer.server.served import Served
from rapid_infer.server.settings import ServerSettings
from rapid_infer.text import Tokenizer

READY = b"ready"

_CONNECT = 10.0
"""Seconds in which the engine begins to listen."""


class FrontStart(msgspec.Struct):
    """What the supervisor sends first, while the model loads. `tokenizer`: a folder, None where there is to be none."""

    settings: ServerSettings
    tokenizer: str | None


class FrontSetup(msgspec.Struct):
    """What it sends when the engine is ready."""

    port: int
    ready: Ready
    engine: str
    metrics: str
    index: int


def main(fd: int) -> int:
    channel = Channel(take_over(fd))
    payload = channel.receive()
    if payload is None:
        return 0
    start = msgspec.msgpack.decode(payload, type=FrontStart)
    settings = start.settings
    set_up_logging(settings)
    leave_out_torch()
    tokenizer = None if start.tokenizer is None else Tokenizer(start.tokenizer)
    payload = channel.receive()
    if payload is None:
        return 0
    setup = msgspec.msgpack.decode(payload, type=FrontSetup)
    llm = AsyncLLM.attach(_connect(setup.engine), setup.ready, tokenizer, f"front{setup.index}.{time.time_ns()}/")
    with Path(setup.metrics).open("r+b") as file:
        metrics = Metrics(file.fileno(), settings.front_processes, setup.index)
    sock = listen(settings.host, setup.port, shared=True)
    threading.Thread(target=_watch, args=(channel,), daemon=True, name="supervisor").start()
    try:
        return run(front(Served(llm, settings, metrics), sock, lambda: channel.send(READY), [signal.SIGTERM]))
    finally:
        llm.shutdown()


def _watch(channel: Channel) -> None:
    """Ends this process as a signal does when the supervisor has gone."""
    with contextlib.suppress(OSError):
        channel.receive()
    signal.raise_signal(signal.SIGTERM)


def _connect(path: str) -> AttachedEngine:
    end = time.monotonic() + _CONNECT
    while True:
        try:
            return AttachedEngine(path)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
