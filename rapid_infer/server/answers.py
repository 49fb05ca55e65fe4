"""One answer to a completion request of either kind: its prompts run, its events are written, its usage is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from rapid_infer.errors import RequestError
from rapid_infer.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.server import events
from rapid_infer.server.errors import ApiError, of_request_error
from rapid_infer.server.http import Exchange
from rapid_infer.server.sampling import PARAMS, structured
from rapid_infer.server.schema import ChatRequest, CompletionRequest
from rapid_infer.server.served import Served, Timeline

T = TypeVar("T")
Take = Callable[[RequestOutput, CompletionOutput], None]


async def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; the first that raises ends the others, and is what is raised."""
    every = list(work)
    if len(every) == 1:
        return [await every[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in every]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def as_one(outputs: list[RequestOutput]) -> RequestOutput:
    """Deltas that have come since the client last read, as one: who reads slowly gets fewer and larger events."""
    whole = outputs[0]
    if len(outputs) == 1:
        return whole
    merged = {one.index: one for one in whole.outputs}
    for output in outputs[1:]:
        for new in output.outputs:
            old = merged.setdefault(new.index, new)
            if old is not new:
                old.text += new.text
                old.token_ids += new.token_ids
                if old.logprobs is not None:
                    old.logprobs += new.logprobs or ()
                old.finish_reason, old.stop_reason, old.error = new.finish_reason, new.stop_reason, new.error
        if output.prompt_logprobs:
            whole.prompt_logprobs = (whole.prompt_logprobs or []) + output.prompt_logprobs
        whole.num_cached_tokens, whole.finished = output.num_cached_tokens, output.finished
    whole.outputs = list(merged.values())
    return whole


def failed(text: str | None) -> ApiError:
    """For a completion that the engine ended in an error."""
    return ApiError(500, text or "the engine ended the completion in an error")


class Answer:
    """`kind` and `chunk_kind` are OpenAI's names of the whole object and of a piece."""

    def __init__(
        self,
        served: Served,
        exchange: Exchange,
        body: CompletionRequest | ChatRequest,
        prefix: str,
        kind: str,
        chunk_kind: str,
    ) -> None:
        self.served, self.exchange = served, exchange
        self._id, self._kind, self._created = prefix + exchange.request_id, kind, int(time.time())
        self._model = body.model or served.model
        self._events = events.Events(self._id, chunk_kind, self._created, self._model)
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._usage_in_each = options is not None and bool(options.continuous_usage_stats)
        self._form_field = structured(body)[0]
        self._timelines: list[Timeline] = []
        self._out: list[bytes] = []
        self._reasons: list[str] = []
        self._running = 0

    async def finish(self, ids: list[int], params: SamplingParams, field: str) -> RequestOutput:
        """Run a prompt to its end. ApiError; errors about the prompt name `field`."""
        try:
            with self.served.request(ids, params, RequestOutputKind.FINAL_ONLY) as (stream, timeline):
                self._timelines.append(timeline)
                output = await stream.take()
                timeline.add(output)
        except RequestError as error:
            raise self._refused(error, field) from None
        self._reasons += [one.finish_reason or "" for one in output.outputs]
        return output

    async def follow(self, ids: list[int], params: SamplingParams, field: str, take: Take) -> None:
        """Run a prompt, and hand on what is new, piece by piece; what `put` was given meanwhile is then written."""
        try:
            with self.served.request(ids, params, RequestOutputKind.DELTA) as (stream, timeline):
                self._timelines.append(timeline)
                self._running += 1
                finished = False
                while not finished:
                    output = as_one(await stream.take_all())
                    timeline.add(output)
                    finished = output.finished
                    for one in output.outputs:
                        if one.finish_reason is not None:
                            self._reasons.append(one.finish_reason)
                        take(output, one)
                    self._running -= finished
                    # The last piece goes out with the end of the stream.
                    if self._running or not finished:
                        await self.flush()
        except RequestError as error:
            raise self._refused(error, field) from None

    def _refused(self, error: RequestError, field: str) -> ApiError:
        refused = of_request_error(error, PARAMS, field)
        if refused.param == "structured_outputs":
            # Of the fields that ask for a form, the one that this request has.
            refused.param = self._form_field
        return refused

    def put(self, choice: bytes) -> None:
        """An event with this choice, to be written with the next `flush`."""
        usage = events.encode(self._usage(False)) if self._usage_in_each else None
        self._out.append(self._events.event(choice, usage))

    async def flush(self) -> None:
        if self._out:
            data, self._out = b"".join(self._out), []
            await self.exchange.write(data)

    async def end_stream(self, hidden: bool = False) -> None:
        """`hidden`: the output is not counted."""
        if self._with_usage:
            self._out.append(self._events.event(b"", events.encode(self._usage(hidden))))
        self._out.append(events.DONE)
        self._note()
        await self.exchange.end(b"".join(self._out))

    async def respond(self, choices: list[dict[str, Any]], hidden: bool = False) -> None:
        """The whole answer."""
        self._note()
        head = {"id": self._id, "object": self._kind, "created": self._created, "model": self._model}
        await self.exchange.respond_json({**head, "choices": choices, "usage": self._usage(hidden)})

    def _usage(self, hidden: bool) -> dict[str, Any]:
        lines = self._timelines
        return events.usage(
            sum(one.num_prompt_tokens for one in lines),
            0 if hidden else sum(one.num_tokens for one in lines),
            sum(one.num_cached_tokens for one in lines),
        )

    def _note(self) -> None:
        """For the line in the log."""
        lines = self._timelines
        first = min((one.first for one in lines if one.first is not None), default=None)
        self.exchange.notes.update(
            prompt_tokens=sum(one.num_prompt_tokens for one in lines),
            cached_tokens=sum(one.num_cached_tokens for one in lines),
            completion_tokens=sum(one.num_tokens for one in lines),
            finish=",".join(dict.fromkeys(self._reasons)),
        )
        if first is not None:
            self.exchange.notes["ttft_ms"] = round((first - self.exchange.began) * 1000, 1)
