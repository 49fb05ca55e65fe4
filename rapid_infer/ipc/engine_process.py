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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rapid_infer.engine.core import EngineCore
from rapid_infer.engine.request import Request
from rapid_infer.engine.results import Finished, StepOutputs
from rapid_infer.errors import EngineDeadError, RapidInferError, RequestError
from rapid_infer.frontend import Grammars
from rapid_infer.ipc import messages
from rapid_infer.ipc.fronts import Arrived, Compiled, FrontGone, Fronts, Inbox
from rapid_infer.ipc.messages import (
    Abort,
    AddRequest,
    GetStats,
    Listen,
    ResetPrefixCache,
    Start,
    StartProfile,
    Stop,
    StopProfile,
    ToEngine,
)
from rapid_infer.ipc.profiler import Profiler
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.outputs import FinishReason
from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import take_over
from rapid_infer.startup import start_engine
from rapid_infer.text import Tokenizer

logger = logging.getLogger(__name__)


LAST_WORDS = 0.4
"""Seconds between the front's going away and a forced end, for a step that is running or a model that loads."""

_WATCH = 0.25


class EngineServer:
    """The main loop over a loaded engine: take messages, step while anything is unfinished, sleep when idle."""

    def __init__(self, core: EngineCore, fronts: Fronts, grammars: Grammars | None = None) -> None:
        self.core = core
        self.fronts = fronts
        self._grammars = grammars
        self._profiler = Profiler()
        self._compiling: dict[str, Request] = {}
        core.executor.on_failure(fronts.inbox.put)
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="grammar")

    def run(self) -> None:
        """Returns when asked to stop. FrontGone, EngineDeadError, or what a broken engine or front raised."""
        while True:
            for one in self.fronts.arrived(lambda: not self.core.has_unfinished_requests()):
                if isinstance(one, Exception):
                    raise one
                if isinstance(one, Compiled):
                    self._take_compiled(one)
                elif isinstance(one.message, Stop):
                    return
                elif one.message is None:
                    self._abort(self.fronts.leave(one.channel))
                else:
                    self._take(one.message, one.channel)
            if self.core.has_unfinished_requests():
                step = self.core.step()
                self._profiler.stepped()
                if step != StepOutputs():
                    self.fronts.send_step(step)

    def _take(self, message: ToEngine, channel: Channel) -> None:
        if isinstance(message, AddRequest):
            self._add(message, channel)
        elif isinstance(message, Abort):
            self._abort(message.request_ids)
        elif isinstance(message, ResetPrefixCache):
            self.core.reset_prefix_cache()
        elif isinstance(message, GetStats):
            scheduler, cache = self.core.scheduler, self.core.cache
            counts = len(scheduler.running), len(scheduler.waiting), cache.num_free, cache.num_usable
            late = self.core.executor.late_graphs()
            self.fronts.send(messages.Stats(*counts, scheduler.stats.preemptions, *late), channel)
        elif isinstance(message, StartProfile | StopProfile):
            self.fronts.send(self._profiler.answer(message), channel)
        elif isinstance(message, Listen):
            self.fronts.listen(message.path)
        else:
            raise ValueError(f"a front may not send {type(message).__name__} now")

    def _add(self, message: AddRequest, channel: Channel) -> None:
        self.fronts.own(message.request_id, channel)
        try:
            request = messages.unpack_request(message)
            if request.params.structured_outputs is None or self._grammars is None:
                self.core.add_request(request)
            else:
                # Other requests go on meanwhile.
                self._compiling[request.request_id] = request
                self._compilers.submit(self._compile, self._grammars, request)
        except RequestError as error:
            self._refuse(message.request_id, error)

    def _compile(self, grammars: Grammars, request: Request) -> None:
        error: str | None = None
        try:
            request.mask = grammars.mask(request)
        except RequestError as refused:
            error = str(refused)
        except Exception as failed:
            logger.exception("a grammar could not be compiled")
            error = f"structured_outputs: {type(failed).__name__}: {failed}"
        self.fronts.inbox.put(Compiled(request, error))

    def _take_compiled(self, message: Compiled) -> None:
        request, error = message.request, message.error
        if self._compiling.pop(request.request_id, None) is None:
            return
        try:
            if error is not None:
                raise RequestError(error)
            self.core.add_request(request)
        except RequestError as refused:
            self._refuse(request.request_id, refused)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        self.fronts.send(messages.RequestRefused(request_id, str(error)), self.fronts.of(request_id))

    def _abort(self, request_ids: list[str]) -> None:
        ended = [Finished(name, FinishReason.ABORT, None, 0) for name in request_ids if self._compiling.pop(name, None)]
        if ended:
            self.fronts.send_step(StepOutputs(finished=ended))
        self.core.abort(request_ids)


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
            inbox.put(Arrived(channel, message))
            if isinstance(message, Stop):
                return
    except (FrontGone, OSError):
        inbox.put(FrontGone())
        time.sleep(LAST_WORDS)
        os._exit(0)
    except Exception as error:
        inbox.put(error)


def start(fronts: Fronts, message: Start) -> tuple[EngineCore, Grammars | None] | None:
    """Load the model and say so; None, with the front told why, when that fails."""
    try:
        checkpoint = read_checkpoint(message.path)
        started = start_engine(checkpoint, message.entry, message.args)
    except BaseException as error:
        if not isinstance(error, RapidInferError):
            logger.exception("the engine did not start")
        fronts.send(messages.pack_failure(error))
        return None
    fronts.send(messages.Ready(started.info))
    path = None if message.args.skip_tokenizer_init else checkpoint.path
    return started.core, Grammars(started.info, lambda: None if path is None else Tokenizer(path))


Begin = Callable[[Fronts, Start], tuple[EngineCore, Grammars | None] | None]


def main(fd: int, begin: Begin = start) -> int:
    """Serve the front at the other end of the socket `fd`, with the engine that `begin` loads; the exit code."""
    channel = Channel(take_over(fd))
    fronts = Fronts(channel)
    try:
        payload = channel.receive()
        if payload is None:
            return 0
        message = messages.to_engine(payload)
        if not isinstance(message, Start):
            raise ValueError(f"expected Start first, got {type(message).__name__}")
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("rapid_infer").setLevel(message.log_level)
        threading.Thread(target=read_messages, args=(channel, fronts.inbox), daemon=True, name="front").start()
        started = begin(fronts, message)
        if started is None:
            return 1
        core, grammars = started
        EngineServer(core, fronts, grammars).run()
        core.close()
    except FrontGone:
        # Taking the interpreter down can take seconds, and from its start the reader thread cannot cut it short.
        os._exit(0)
    except BaseException as error:
        if not isinstance(error, EngineDeadError):
            logger.exception("the engine process cannot go on")
        text = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(FrontGone):
            fronts.send_all(messages.Died(text))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
