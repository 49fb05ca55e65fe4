"""The engine process: `python -m rapid_infer.ipc.engine_process FD`, where FD is its end of the front's socket.

The main thread owns the engine; a reader thread feeds it messages, so that a long step never stops the front from
sending. The process ends when the front asks for it or goes away (exit code 0), or when the engine dies (1).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from rapid_infer.engine.core import EngineCore
from rapid_infer.engine.results import StepOutputs
from rapid_infer.errors import EngineDeadError, RapidInferError, RequestError
from rapid_infer.ipc import messages
from rapid_infer.ipc.messages import Abort, AddRequest, FromEngine, GetStats, ResetPrefixCache, Start, Stop, ToEngine
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import take_over
from rapid_infer.startup import start_engine

logger = logging.getLogger(__name__)

Inbox = SimpleQueue[ToEngine | Exception]

LAST_WORDS = 0.4
"""Seconds between the front's going away and a forced end, for a step that is running or a model that loads."""

_WATCH = 0.25


class FrontGone(Exception):
    """The front has closed its end of the socket, or its process has ended."""


class EngineServer:
    """The main loop over a loaded engine: take messages, step while anything is unfinished, sleep when idle."""

    def __init__(self, core: EngineCore, channel: Channel, inbox: Inbox) -> None:
        self.core = core
        self.channel = channel
        self.inbox = inbox

    def run(self) -> None:
        """Returns when asked to stop. FrontGone, EngineDeadError, or what a broken engine or front raised."""
        while True:
            for message in self._arrived():
                if isinstance(message, Stop):
                    return
                if isinstance(message, Exception):
                    raise message
                self._take(message)
            if self.core.has_unfinished_requests():
                step = self.core.step()
                if step != StepOutputs():
                    self._send(messages.Outputs(step))

    def _arrived(self) -> Iterator[ToEngine | Exception]:
        """What has arrived; when nothing has and nothing is left to do, waits for the next message."""
        while True:
            try:
                yield self.inbox.get(block=not self.core.has_unfinished_requests())
            except Empty:
                return

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, Abort):
            self.core.abort(message.request_ids)
        elif isinstance(message, ResetPrefixCache):
            self.core.reset_prefix_cache()
        elif isinstance(message, GetStats):
            scheduler, cache = self.core.scheduler, self.core.cache
            counts = len(scheduler.running), len(scheduler.waiting), cache.num_free, cache.num_usable
            self._send(messages.Stats(*counts, *self.core.executor.late_graphs()))
        else:
            raise ValueError(f"a front may not send {type(message).__name__} now")

    def _add(self, message: AddRequest) -> None:
        try:
            self.core.add_request(messages.unpack_request(message))
        except RequestError as error:
            self._send(messages.RequestRefused(message.request_id, str(error)))

    def _send(self, message: FromEngine) -> None:
        _send(self.channel, message)


def _send(channel: Channel, message: FromEngine) -> None:
    try:
        channel.send(messages.encode(message))
    except OSError as error:
        raise FrontGone from error


def read_messages(channel: Channel, inbox: Inbox) -> None:
    """The reader thread. When the front goes away, it ends the process itself if the main thread does not."""
    parent = os.getppid()
    try:
        while True:
            # A process that the front forked may keep the socket open after it.
            while not channel.wait(_WATCH):
                if os.getppid() != parent:
                    raise FrontGone
            payload = channel.receive()
            if payload is None:
                raise FrontGone
            message = messages.to_engine(payload)
            inbox.put(message)
            if isinstance(message, Stop):
                return
    except (FrontGone, OSError):
        inbox.put(FrontGone())
        time.sleep(LAST_WORDS)
        os._exit(0)
    except Exception as error:
        inbox.put(error)


def start(channel: Channel, message: Start) -> EngineCore | None:
    """Load the model and say so; None, with the front told why, when that fails."""
    try:
        started = start_engine(read_checkpoint(message.path), message.entry, message.args)
    except BaseException as error:
        if not isinstance(error, RapidInferError):
            logger.exception("the engine did not start")
        _send(channel, messages.pack_failure(error))
        return None
    _send(channel, messages.Ready(started.info))
    return started.core


def main(fd: int) -> int:
    """Serve the front at the other end of the socket `fd`; returns the exit code."""
    channel = Channel(take_over(fd))
    inbox: Inbox = SimpleQueue()
    try:
        payload = channel.receive()
        if payload is None:
            return 0
        message = messages.to_engine(payload)
        if not isinstance(message, Start):
            raise ValueError(f"expected Start first, got {type(message).__name__}")
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("rapid_infer").setLevel(message.log_level)
        threading.Thread(target=read_messages, args=(channel, inbox), daemon=True, name="front").start()
        core = start(channel, message)
        if core is None:
            return 1
        EngineServer(core, channel, inbox).run()
        core.close()
    except FrontGone:
        # Taking the interpreter down can take seconds, and from its start the reader thread cannot cut it short.
        os._exit(0)
    except BaseException as error:
        if not isinstance(error, EngineDeadError):
            logger.exception("the engine process cannot go on")
        text = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(FrontGone):
            _send(channel, messages.Died(text))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
