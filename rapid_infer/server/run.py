"""Runs the application: sockets, the event loop, signals, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from rapid_infer.async_llm import AsyncLLM
from rapid_infer.errors import ConfigError
from rapid_infer.frontend import EngineInfo
from rapid_infer.server.app import App
from rapid_infer.server.metrics import Metrics
from rapid_infer.server.served import Served
from rapid_infer.server.settings import ServerSettings

logger = logging.getLogger("rapid_infer.server")

BACKLOG = 2048
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL = 0.1
_FILES = 65536
_SEND_BUFFER = 2**17
_SILENCE = 150_000
"""Milliseconds; more than `ServerSettings.write_timeout`, after which requests end."""


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """Bound, not listening yet: the port is ours before the model loads. ConfigError when it is taken.

    `shared`: other processes of ours may bind it too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit it: what a client does not read waits as text that is merged, not as megabytes of events.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # The same for one that has gone without a word, or leaves its window closed.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot serve on {host} port {port}: {error.strerror or error}; choose another --host or --port"
        ) from error
    return sock


def ready_line(settings: ServerSettings, info: EngineInfo, sock: socket.socket) -> str:
    model, longest = settings.served_names[0], info.max_model_len
    kind = f"{info.architecture}, {info.dtype} on {info.device}, up to {longest} tokens"
    return f"{model} ({kind}) is ready on {address(sock)}"


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def set_up_logging(settings: ServerSettings) -> None:
    """Lines on stderr; nothing of the libraries but warnings."""
    pattern = "%(message)s" if settings.log_format == "json" else "%(asctime)s %(levelname)s %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(pattern))
    for name in ("rapid_infer", "uvicorn"):
        one = logging.getLogger(name)
        one.handlers, one.propagate = [handler], False
        one.setLevel(logging.INFO if name == "rapid_infer" else logging.WARNING)


def raise_file_limit() -> None:
    """Each connection takes a file, and many systems give a process 1024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def leave_out_torch() -> None:
    """Nothing in this process can import torch from now on; transformers then does without, in half the time."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def serve(model: str, engine_args: dict[str, Any], settings: ServerSettings) -> int:
    """Serve until a signal comes or the engine dies; the exit code: 0 for a signal, 1 for a dead engine."""
    set_up_logging(settings)
    raise_file_limit()
    leave_out_torch()
    sock = listen(settings.host, settings.port)
    if not settings.api_keys and settings.host not in LOOPBACK:
        logger.warning("serving on %s without an API key: whoever reaches the port may use the model", settings.host)
    if settings.front_processes > 1:
        from rapid_infer.server.supervisor import Supervisor

        return Supervisor(model, engine_args, settings, sock).run()
    llm = AsyncLLM(model, **engine_args)
    try:
        served = Served(llm, settings, Metrics())
        return run(front(served, sock, lambda: logger.info("%s", ready_line(settings, llm.info, sock)), SIGNALS))
    finally:
        llm.shutdown()
        sock.close()


def run(work: Any) -> int:
    """On uvloop where it is installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def front(
    served: Served, sock: socket.socket, on_ready: Callable[[], None], signals: Sequence[signal.Signals]
) -> int:
    """Serve on `sock` until one of `signals` comes or the engine dies. `on_ready` is called when it listens."""
    config = uvicorn.Config(
        App(served),
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        server_header=False,
        proxy_headers=False,
        ws="none",
    )
    server = Server(config)
    server.on_ready = on_ready
    stop = Stop(served, server)
    # What is there now stays: the garbage collector need not walk over it again.
    gc.collect()
    gc.freeze()
    with stop.on_signals(signals):
        tick = asyncio.create_task(served.tick())
        watch = asyncio.create_task(stop.watch(tick))
        await server.serve(sockets=[sock])
        for task in (tick, watch):
            task.cancel()
        await asyncio.gather(tick, watch, return_exceptions=True)
    served.close()
    return stop.code


class Server(uvicorn.Server):
    """Leaves signals to `Stop`, and says when it listens."""

    on_ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Stop:
    """How the server ends: drained after a signal, at once after a second one, with an error when the engine dies."""

    def __init__(self, served: Served, server: Any) -> None:
        self._served, self._server = served, server
        self._signals = 0
        self.code = 0

    @contextlib.contextmanager
    def on_signals(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for one in signals:
            loop.add_signal_handler(one, self._signal)
        try:
            yield
        finally:
            for one in signals:
                loop.remove_signal_handler(one)

    def _signal(self) -> None:
        self._signals += 1
        if not self._served.draining:
            count, seconds = len(self._served.exchanges), self._served.settings.drain_timeout
            logger.info("stopping: %d requests in progress get %g s to end", count, seconds)
        self._served.draining = True

    async def watch(self, tick: asyncio.Task[None]) -> None:
        """Ends the server when it is time."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while True:
            await asyncio.sleep(_POLL)
            self._served.let_go_of_stuck()
            if tick.done():
                self.code = 1
                logger.error("the engine has ended: %s", self._served.health())
                # Let the answers that say so go out.
                await asyncio.sleep(2 * _POLL)
                break
            if self._served.draining:
                deadline = loop.time() + self._served.settings.drain_timeout if deadline is None else deadline
                if not self._served.exchanges or loop.time() > deadline or self._signals > 1:
                    break
        for exchange in list(self._served.exchanges):
            exchange.leave()
        self._server.should_exit = True
