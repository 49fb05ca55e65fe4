"""Text in, text out over an `EngineCore` in this process: requests with n completions, step by step."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rapid_infer.config import EngineArgs
from rapid_infer.engine.core import INTERRUPTED
from rapid_infer.engine.request import Request
from rapid_infer.engine.results import StepOutputs
from rapid_infer.errors import EngineDeadError
from rapid_infer.exclusive import Exclusive, exclusive
from rapid_infer.frontend import Grammars, InputProcessor, OutputProcessor, Prompt
from rapid_infer.outputs import CompletionOutput, FinishReason, RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.profiling import span
from rapid_infer.startup import locate, start_engine

__all__ = ["LLMEngine", "Prompt"]

NewRequest = tuple[str, Prompt, SamplingParams | None]


@dataclass(slots=True)
class _Open:
    """A request whose end has not been handed out. `deliver` gets its outputs; None: whoever calls `step`."""

    output: RequestOutput
    n: int
    deliver: Callable[[RequestOutput], object] | None

    def failed(self) -> RequestOutput:
        ends = [CompletionOutput(i, finish_reason=FinishReason.ERROR.value, error=INTERRUPTED) for i in range(self.n)]
        return replace(self.output, outputs=ends, num_cached_tokens=0, prompt_logprobs=None, finished=True)


class LLMEngine(Exclusive):
    """`add_request`, then `step` while `has_unfinished_requests`. Takes the same arguments as `LLM`.

    Errors at construction: ConfigError, PluginError, WeightError, HubError. May be called from several threads, which
    take turns; not in a process that was forked from this one. A call that an interrupt cuts short ends all requests
    in an error. EngineDeadError from every call when the device is lost, after `close()`, and in a forked process.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **kwargs: Any) -> None:
        super().__init__()
        self.args = EngineArgs.from_kwargs(**kwargs)
        self.checkpoint, entry = locate(model, self.args)
        started = start_engine(self.checkpoint, entry, self.args, with_tokenizer=not self.args.skip_tokenizer_init)
        self.core, self.config, self.tokenizer = started.core, started.config, started.tokenizer
        self.executor: Any = self.core.executor
        self.inputs = InputProcessor(started.info, self.tokenizer)
        self.outputs = OutputProcessor(self.tokenizer)
        self._grammars = Grammars(started.info, lambda: self.tokenizer)
        self._open: dict[str, _Open] = {}
        self._failed: list[RequestOutput] = []
        self._leaving: deque[str] = deque()
        self._changing = False

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `changes` field by field."""
        return self.inputs.default_sampling_params(**changes)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, not looked at yet. RequestError when it is text and there is no tokenizer."""
        self.check_usable()
        return self.inputs.encode(prompt)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> None:
        """Queue a request; without `params`, with the model's own defaults.

        RequestError, and nothing queued, when it is invalid or the id is in use.
        """
        self.add_requests([(request_id, prompt, params)], output_kind)

    def add_requests(
        self,
        new: Sequence[NewRequest],
        output_kind: RequestOutputKind,
        deliver: Callable[[RequestOutput], object] | None = None,
    ) -> None:
        """Queue requests (id, prompt, parameters): all of them or, with a RequestError, none.

        With `deliver`, it is called with their outputs, by whichever thread makes the step, and `step` does not return
        them. It must not wait, and not call the engine.
        """
        self.check_usable()
        encoded = self.inputs.encode_all([prompt for _, prompt, _ in new])
        self._queue(new, encoded, output_kind, deliver)

    @exclusive
    def _queue(
        self,
        new: Sequence[NewRequest],
        encoded: Sequence[list[int]],
        kind: RequestOutputKind,
        deliver: Callable[[RequestOutput], object] | None,
    ) -> None:
        made: list[tuple[RequestOutput, SamplingParams, list[Request]]] = []
        with self.inputs.forgetting_refused():
            for (request_id, prompt, given), ids in zip(new, encoded):
                self.inputs.check_call(request_id, kind, self._open)
                params = self.default_sampling_params() if given is None else given
                output = RequestOutput(request_id, prompt if isinstance(prompt, str) else None, ids, [])
                requests = self.inputs.requests(request_id, ids, params)
                for request in requests:
                    request.mask = self._grammars.mask(request)
                made.append((output, params, requests))
        self._changing = True
        for output, params, requests in made:
            self._open[output.request_id] = _Open(output, params.n, deliver)
            self.outputs.add(output, params, kind, [request.request_id for request in requests])
            for request in requests:
                self.core.add_request(request)
        self._changing = False

    @exclusive
    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; unknown ids are ignored. Their last output comes from the next `step`."""
        self.core.abort(self.outputs.engine_ids(request_ids))

    def discard(self, request_ids: Iterable[str]) -> None:
        """End these requests without any further output, as for a caller that went away.

        Raises nothing. From a finalizer that runs in the middle of a call, it is done by the next call.
        """
        self._leaving += request_ids
        if self._ours and not self._inside:
            with suppress(EngineDeadError):
                self._sweep()

    @exclusive
    def _sweep(self) -> None:
        """Every call begins with what this is for."""

    def _clear_away(self) -> None:
        """End what a call that was cut short has left in an unknown state, and requests that were discarded."""
        # A dead engine says so itself when it is used, and can be closed.
        with suppress(EngineDeadError):
            if self._changing:
                self.core.start_over()
                self.outputs = OutputProcessor(self.tokenizer)
                self._failed = [request.failed() for request in self._open.values()]
                self._changing = False
            while self._leaving:
                self._changing = True
                request_id = self._leaving[0]
                self.core.abort(self.outputs.discard([request_id]))
                self._failed = [output for output in self._failed if output.request_id != request_id]
                self._open.pop(request_id, None)
                self._leaving.popleft()
                self._changing = False

    def has_unfinished_requests(self) -> bool:
        return len(self._open) > 0

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Run one engine step; returns the requests that got tokens or ended, in the manner of their output kind."""
        self._changing = True
        with span("llm_engine.step"):
            outputs = self.take(self.core.step())
        if self._failed:
            outputs = self._failed + outputs
        returned: list[RequestOutput] = []
        for output in outputs:
            (self._open[output.request_id].deliver or returned.append)(output)
            if output.finished:
                # Not before it has been delivered, or it could be lost between the two.
                del self._open[output.request_id]
        self._failed, self._changing = [], False
        return returned

    def take(self, step: StepOutputs) -> list[RequestOutput]:
        """Make outputs of an engine step, and end what a stop string has ended."""
        with span("frontend.outputs"):
            outputs, stopped = self.outputs.process(step)
            self.core.abort(stopped)
            return outputs

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.core.reset_prefix_cache()

    def close(self) -> None:
        """Drop model and caches; every later call but this one raises. In a forked process, nothing is ours to drop."""
        if self._ours:
            self._close()

    @exclusive
    def _close(self) -> None:
        self._closed = True
        self.core.close()
