"""Online use: an engine in a process of its own, and any number of requests at once from one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import weakref
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from types import TracebackType
from typing import Any, TypeVar

from rapid_infer.config import EngineArgs
from rapid_infer.engine.results import StepOutputs
from rapid_infer.errors import EngineDeadError, RapidInferError, RequestError
from rapid_infer.exclusive import forked
from rapid_infer.frontend import InputProcessor, OutputProcessor, Prompt
from rapid_infer.ipc import messages
from rapid_infer.ipc.attached import AttachedEngine
from rapid_infer.ipc.launch import GRACE, EngineProcess
from rapid_infer.ipc.messages import (
    Abort,
    Died,
    GetStats,
    Outputs,
    Profiled,
    Ready,
    RequestRefused,
    ResetPrefixCache,
    StartProfile,
    Stats,
    Stop,
    StopProfile,
)
from rapid_infer.outputs import RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.processes.channel import AsyncChannel, frame
from rapid_infer.startup import locate
from rapid_infer.text import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class Stream:
    """A request in progress: what has arrived for it and has not been taken."""

    request_id: str
    kind: RequestOutputKind
    engine_ids: list[str]
    arrived: deque[RequestOutput] = field(default_factory=deque)
    error: RapidInferError | None = None
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: RequestOutput) -> None:
        # A cumulative output is one object that grows: a slow reader finds all of it in the place that waits.
        if not self.arrived or self.arrived[-1] is not output:
            self.arrived.append(output)
        self.event.set()

    def fail(self, error: RapidInferError) -> None:
        self.error = error
        self.event.set()

    async def take(self) -> RequestOutput:
        while not self.arrived:
            if self.error is not None:
                raise self.error
            self.event.clear()
            await self.event.wait()
        output = self.arrived.popleft()
        return _snapshot(output) if self.kind is RequestOutputKind.CUMULATIVE else output

    async def take_all(self) -> list[RequestOutput]:
        """Everything that has arrived, at least one; for a reader that wants to catch up at once."""
        outputs = [await self.take()]
        while self.arrived:
            outputs.append(await self.take())
        return outputs


class AsyncLLM:
    """A loaded model in a process of its own. Takes the same arguments as `LLM`, and starts with the same errors.

    Construction waits until the model is loaded. Use it from one event loop at a time: RequestError while another one
    runs in another thread, EngineDeadError in a forked process. `shutdown()`, or `async with`, ends the engine process,
    as does dropping the object or leaving the interpreter. When the engine process dies, every `generate()` in progress
    and every later call raises EngineDeadError.
    """

    def __init__(self, model: str | PathLike[str] = "demo", **kwargs: Any) -> None:
        self.args = EngineArgs.from_kwargs(**kwargs)
        self.checkpoint, entry = locate(model, self.args)
        self._process: EngineProcess | AttachedEngine = EngineProcess(self.checkpoint.path, entry, self.args)
        try:
            # The engine loads weights meanwhile.
            tokenizer = None if self.args.skip_tokenizer_init else Tokenizer(self.checkpoint.path)
            ready = self._process.wait_ready()
        except BaseException:
            self._process.stop(grace=0)
            raise
        self._set_up(ready, tokenizer, "")

    @classmethod
    def attach(cls, process: AttachedEngine, ready: Ready, tokenizer: Tokenizer | None, name: str) -> AsyncLLM:
        """A further front of an engine that is `ready`; `name` tells its requests from those of the others.

        `shutdown()` leaves the engine alone.
        """
        llm = cls.__new__(cls)
        llm._process = process
        llm._set_up(ready, tokenizer, name)
        return llm

    def _set_up(self, ready: Ready, tokenizer: Tokenizer | None, name: str) -> None:
        self.tokenizer = tokenizer
        # Seeds follow from arrivals, which each front counts for itself.
        first_arrival = zlib.crc32(name.encode()) << 32 if name else 0
        self.inputs = InputProcessor(ready.info, tokenizer, first_arrival)
        self.info = self.inputs.info
        self.outputs = OutputProcessor(tokenizer)
        self._waiting: dict[str, Stream] = {}
        self._questions: deque[asyncio.Future[Stats]] = deque()
        self._profiles: deque[asyncio.Future[Profiled]] = deque()
        self._names = (f"{name}request-{i}" for i in itertools.count())
        self._dead: str | None = None
        self._channel = AsyncChannel(self._process.sock, self)
        self._finalizer = weakref.finalize(self, _end, self._channel, self._process, GRACE)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt (text or token ids); without `sampling_params`, with the model's own defaults.

        Yields what `output_kind` says, each time an object of its own; the last has `finished`. Closing the iterator
        or cancelling the task ends the request in the engine. RequestError for an invalid request or an id in use,
        EngineDeadError.
        """
        with self.open(prompt, sampling_params, request_id, output_kind=output_kind) as stream:
            while True:
                output = await stream.take()
                yield output
                if output.finished:
                    return

    @contextlib.contextmanager
    def open(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> Iterator[Stream]:
        """As `generate`, for who takes the outputs himself; leaving the block ends the request in the engine."""
        waiting = self._submit(prompt, sampling_params, request_id, output_kind)
        try:
            yield waiting
        finally:
            self._leave(waiting)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation by the model's chat template, otherwise as `generate`.

        `options`, and errors because of them, are those of `LLM.encode_chat`.
        """
        ids = self.inputs.encode_chat(messages, **options)
        # Closing this generator must close the inner one at once, not when it is collected.
        async with contextlib.aclosing(
            self.generate(ids, sampling_params, request_id, output_kind=output_kind)
        ) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate()` yields what there is, with finish_reason "abort". Unknown ids are ignored."""
        self._check_alive()
        if names := self.outputs.engine_ids([request_id]):
            self._tell(Abort(names))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; holds for every request made after this call."""
        self._check_alive()
        self._tell(ResetPrefixCache())

    async def stats(self) -> Stats:
        """How many requests run and wait, and how many cache blocks are free, between two steps of the engine."""
        self._check_alive()
        question: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._questions.append(question)
        self._tell(GetStats())
        return await question

    async def start_profile(self, folder: str | PathLike[str], prefix: str, num_steps: int | None = None) -> str:
        """Record the engine's steps, at most `num_steps`; returns where the trace will be. RequestError."""
        return await self._profile(StartProfile(fspath(folder), prefix, num_steps))

    async def stop_profile(self) -> str:
        """Write the trace; returns its path when it is on disk. RequestError when nothing is recorded."""
        return await self._profile(StopProfile())

    async def _profile(self, message: StartProfile | StopProfile) -> str:
        self._check_alive()
        question: asyncio.Future[Profiled] = asyncio.get_running_loop().create_future()
        self._profiles.append(question)
        self._tell(message)
        answer = await question
        if answer.error is not None:
            raise RequestError(answer.error)
        return answer.path

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `changes` field by field."""
        return self.inputs.default_sampling_params(**changes)

    @property
    def recommended(self) -> Mapping[str, Any]:
        """What the model's generation_config.json says of `SamplingParams`."""
        return self.info.default_sampling_params

    @property
    def is_running(self) -> bool:
        """Whether the engine process is there to serve requests."""
        return self._dead is None and self._process.process.poll() is None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine serves no more requests, if it does not."""
        return None if self._dead is None else EngineDeadError(self._dead)

    def shutdown(self, timeout: float = GRACE) -> None:
        """End the engine process, by force if it takes longer than `timeout`; waits for it. Later calls do nothing.

        RequestError while its event loop runs in another thread. Does nothing in a forked process.
        """
        if not self._process.is_ours:
            return
        if self._finalizer.alive:
            self._check_place()
        self._die("AsyncLLM was shut down")
        if self._finalizer.detach() is not None:
            _end(self._channel, self._process, timeout)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, name: str | None, kind: RequestOutputKind
    ) -> Stream:
        self._check_alive()
        params = self.default_sampling_params() if params is None else params
        if name is None:
            name = next(name for name in self._names if name not in self._waiting)
        self.inputs.check_call(name, kind, self._waiting)
        ids = self.inputs.encode(prompt)
        with self.inputs.forgetting_refused():
            requests = self.inputs.requests(name, ids, params)
            try:
                frames = [frame(messages.encode(messages.pack_request(request))) for request in requests]
            except ValueError as error:
                raise RequestError(f"the request cannot be sent to the engine: {error}") from error
        waiting = Stream(name, kind, [request.request_id for request in requests])
        output = RequestOutput(name, prompt if isinstance(prompt, str) else None, ids, [])
        self.outputs.add(output, params, kind, waiting.engine_ids)
        self._waiting[name] = waiting
        self._channel.send(b"".join(frames))
        return waiting

    def _leave(self, waiting: Stream) -> None:
        """Forget a request, and end it in the engine if it has not ended."""
        del self._waiting[waiting.request_id]
        if names := self.outputs.discard([waiting.request_id]):
            self._tell(Abort(names))

    def _tell(self, message: messages.ToEngine) -> None:
        self._channel.send(frame(messages.encode(message)))

    def _check_place(self) -> None:
        if not self._process.is_ours:
            raise EngineDeadError(forked(self._process.owner))
        if self._channel.in_use_elsewhere:
            raise RequestError(
                "this AsyncLLM is in use by another event loop, which runs in another thread; call it there, by "
                "asyncio.run_coroutine_threadsafe or loop.call_soon_threadsafe, or make an AsyncLLM for each loop"
            )

    def _check_alive(self) -> None:
        self._check_place()
        self._channel.attach()
        if self._dead is None and self._process.process.poll() is not None:
            # Nothing more can arrive; what the engine said last is the better reason.
            while self._channel.read():
                pass
            self._die(self._process.how_it_ended())
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def message_received(self, payload: bytes) -> None:
        """For the channel."""
        try:
            match messages.from_engine(payload):
                case Outputs(step):
                    self._deliver(step)
                case RequestRefused(request_id, why):
                    for waiting in self._waiting.values():
                        if request_id in waiting.engine_ids:
                            waiting.fail(RequestError(why))
                case Stats() as stats:
                    _settle(self._questions.popleft(), stats)
                case Profiled() as profiled:
                    _settle(self._profiles.popleft(), profiled)
                case Died(why):
                    self._die(why)
                case other:
                    raise TypeError(f"an engine may not send {type(other).__name__} now")
        except Exception as error:
            logger.exception("a message of the engine could not be used")
            self._die(f"a message of the engine could not be used: {type(error).__name__}: {error}")
            self._process.process.kill()

    def connection_lost(self, error: Exception | None) -> None:
        """For the channel."""
        ending = self._process.how_it_ended()
        self._die(ending if error is None or isinstance(error, OSError) else f"{ending}: {error}")

    def _deliver(self, step: StepOutputs) -> None:
        outputs, stopped = self.outputs.process(step)
        if stopped:
            self._tell(Abort(stopped))
        for output in outputs:
            self._waiting[output.request_id].put(output)

    def _die(self, text: str) -> None:
        """Every call in progress and every later one fails with this; the first text stays."""
        if self._dead is not None:
            return
        self._dead = text
        for waiting in self._waiting.values():
            waiting.fail(EngineDeadError(text))
        questions: list[asyncio.Future[Any]] = [*self._questions, *self._profiles]
        for question in questions:
            if not question.done():
                question.set_exception(EngineDeadError(text))
        self._questions.clear()
        self._profiles.clear()


def _settle(question: asyncio.Future[T], answer: T) -> None:
    if not question.done():
        question.set_result(answer)


def _end(channel: AsyncChannel, process: EngineProcess | AttachedEngine, grace: float) -> None:
    if process.is_ours:
        channel.send(frame(messages.encode(Stop())))
        channel.close()
        process.stop(grace)


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that stays as it is while the request goes on."""
    completions = [
        replace(one, token_ids=list(one.token_ids), logprobs=None if one.logprobs is None else list(one.logprobs))
        for one in output.outputs
    ]
    prompt = output.prompt_logprobs
    return replace(output, outputs=completions, prompt_logprobs=None if prompt is None else list(prompt))
