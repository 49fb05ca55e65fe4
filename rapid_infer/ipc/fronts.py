"""The fronts of an engine process: the one that started it, and others that connect and may come and go."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from rapid_infer.engine.request import Request
from rapid_infer.engine.results import StepOutputs
from rapid_infer.ipc import messages
from rapid_infer.ipc.messages import FromEngine, Stop, ToEngine
from rapid_infer.processes.channel import Channel

logger = logging.getLogger(__name__)

_SEND_TIMEOUT = 5
"""Seconds after which a front that takes nothing is let go, for the others wait meanwhile."""

_SEND_BUFFER = 4 * 2**20


class FrontGone(Exception):
    """The front that started the process has closed its end of the socket, or its process has ended."""


@dataclass(frozen=True)
class Arrived:
    """A message, and whose it is. None: this front has left."""

    channel: Channel
    message: ToEngine | None


@dataclass(frozen=True)
class Compiled:
    """A thread has made the mask of a request, or says why it cannot be."""

    request: Request
    error: str | None


Inbox = SimpleQueue[Arrived | Compiled | Exception]


class Fronts:
    """`main` started the process; without it, FrontGone. Request ids of different fronts must differ."""

    def __init__(self, main: Channel) -> None:
        self.main = main
        self.inbox: Inbox = SimpleQueue()
        self._owners: dict[str, Channel] = {}
        self._others: list[Channel] = []
        # Whose tokens are where in a step, as in the last one: a batch that goes on is divided the same way.
        self._names: list[str] = []
        self._places: dict[Channel, list[int]] = {}

    def arrived(self, wait: Callable[[], bool]) -> Iterator[Arrived | Compiled | Exception]:
        """What has arrived; where nothing has and `wait()`, the next."""
        while True:
            try:
                yield self.inbox.get(block=wait())
            except Empty:
                return

    def listen(self, path: str) -> None:
        """Let other fronts connect to the Unix socket `path`, from now on. OSError."""
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        threading.Thread(target=self._accept, args=(server,), daemon=True, name="fronts").start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            sock, _ = server.accept()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT, 0))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            channel = Channel(sock)
            self._others.append(channel)
            threading.Thread(target=self._read, args=(channel,), daemon=True, name="front").start()

    def _read(self, channel: Channel) -> None:
        try:
            while (payload := channel.receive()) is not None:
                message = messages.to_engine(payload)
                if isinstance(message, Stop):
                    break
                self.inbox.put(Arrived(channel, message))
        except Exception as error:
            logger.warning("a front is let go: %s: %s", type(error).__name__, error)
        self.inbox.put(Arrived(channel, None))

    def own(self, request_id: str, channel: Channel) -> None:
        """What the engine says of this request goes to this front."""
        if channel is not self.main:
            self._owners[request_id] = channel

    def of(self, request_id: str) -> Channel:
        return self._owners.get(request_id, self.main)

    def leave(self, channel: Channel) -> list[str]:
        """Forget a front; returns the requests that it leaves behind."""
        channel.sock.close()
        self._others.remove(channel)
        return [name for name, owner in self._owners.items() if owner is channel]

    def send(self, message: FromEngine, channel: Channel | None = None) -> None:
        """To a front, else to the main one: FrontGone when that has gone; another one will be found to have left."""
        channel = channel or self.main
        try:
            channel.send(messages.encode(message))
        except OSError as error:
            if channel is self.main:
                raise FrontGone from error
            channel.sock.close()

    def send_all(self, message: FromEngine) -> None:
        """As `send`, to every front."""
        for channel in (*self._others, self.main):
            self.send(message, channel)

    def send_step(self, step: StepOutputs) -> None:
        """To each front what is its own."""
        if not self._owners:
            self.send(messages.Outputs(step))
            return
        for channel, part in self._parts(step).items():
            self.send(messages.Outputs(part), channel)
        for end in step.finished:
            self._owners.pop(end.request_id, None)

    def _parts(self, step: StepOutputs) -> dict[Channel, StepOutputs]:
        owners, main, tokens = self._owners, self.main, step.token_ids
        if step.request_ids != self._names:
            self._names, self._places = step.request_ids, {}
            for place, name in enumerate(step.request_ids):
                self._places.setdefault(owners.get(name, main), []).append(place)
        parts = {
            channel: StepOutputs([self._names[i] for i in places], [tokens[i] for i in places])
            for channel, places in self._places.items()
        }

        def of(name: str) -> StepOutputs:
            channel = owners.get(name, main)
            part = parts.get(channel)
            if part is None:
                part = parts[channel] = StepOutputs()
            return part

        for end in step.finished:
            of(end.request_id).finished.append(end)
        for name, scores in step.logprobs.items():
            of(name).logprobs[name] = scores
        for name, pieces in step.prompt_logprobs.items():
            of(name).prompt_logprobs[name] = pieces
        for name, cached in step.num_cached_tokens.items():
            of(name).num_cached_tokens[name] = cached
        return parts
