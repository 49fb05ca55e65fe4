"""The loop: plan a step, launch it, and collect the oldest one in flight. Knows no text, no device and no model."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rapid_infer.cache.manager import CacheManager
from rapid_infer.config import EngineConfig
from rapid_infer.engine import results
from rapid_infer.engine.executor import Executor
from rapid_infer.engine.masks import AllowedTokens
from rapid_infer.engine.plan_builder import make_masks
from rapid_infer.engine.request import Request, RequestStatus, validate_prompt
from rapid_infer.engine.results import StepOutputs
from rapid_infer.engine.scheduled_step import ScheduledStep
from rapid_infer.engine.scheduler import Scheduler
from rapid_infer.errors import EngineDeadError, RequestError
from rapid_infer.exclusive import CLOSED
from rapid_infer.outputs import FinishReason
from rapid_infer.profiling import span

logger = logging.getLogger(__name__)

INTERRUPTED = "the engine was interrupted in the middle of a step; all requests that it had were dropped"


class EngineCore:
    """Drives one executor. `queue_depth` steps may be in flight: with 2, step N+1 is launched before N is read.

    Every request added ends in exactly one `Finished` event of some `step()`. Whatever is raised in the middle of a
    call, an interrupt or a MemoryError say, reaches the caller; the next call then starts over with empty caches, and
    all requests that were there end in an error. For one thread at a time.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.executor = executor
        self.info = executor.info
        self.queue_depth = config.scheduler.queue_depth
        self._config = config.scheduler
        self._requests: dict[str, Request] = {}
        self._outputs = StepOutputs()
        self._dead: str | None = None
        self._begin()

    def _begin(self, last_step: int = 0) -> None:
        """Nothing is cached, planned or in flight."""
        info, longest = self.info, self._config.max_num_batched_tokens
        self.cache = CacheManager(info.groups, info.num_blocks, info.block_size, longest)
        self.scheduler = Scheduler(self._config, self.cache, info.max_model_len, info.num_drafts, last_step=last_step)
        self._in_flight: deque[tuple[ScheduledStep, Any]] = deque()
        # Set while a call changes things: found set by the next call, it says that this one was cut short.
        self._changing = False

    def add_request(self, request: Request) -> None:
        """Queue a request. RequestError, and nothing queued, when it can never run or its id is in use."""
        self._check_usable()
        validate_prompt(request.prompt_token_ids, self.info.vocab_size, self.info.max_model_len)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; expected a new one")
        allowed = request.params.allowed_token_ids
        if allowed is not None and request.mask is None:
            request.mask = AllowedTokens(allowed, self.info.vocab_size)
        self._changing = True
        self._requests[request.request_id] = request
        self.scheduler.add_request(request)
        self._changing = False

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; ids that are unknown or already ended are ignored. The next `step()` reports it."""
        if self._dead is not None:
            return
        self._check_usable()
        self._changing = True
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.status is not RequestStatus.FINISHED:
                self.scheduler.finish(request, FinishReason.ABORT)
                self._outputs.end(request)
        self._changing = False

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._in_flight or self._outputs.finished)

    def step(self) -> StepOutputs:
        """Launch the next step if there is one, and collect when the queue is full or nothing can be launched.

        A forward that raises ends that step's requests with an error; EngineDeadError when the device is lost with it.
        """
        self._check_usable()
        self._changing = True
        outputs = self._outputs
        with span("engine.schedule"):
            step = self.scheduler.schedule()
        if step is not None:
            self._launch(step, outputs)
            self._end(step.failed, outputs)
        elif not self._in_flight and (self.scheduler.waiting or self.scheduler.running):
            self._die(f"requests wait and none can run: {self._state()}")
        if self._in_flight and (step is None or len(self._in_flight) >= self.queue_depth):
            self._collect(outputs)
        if not self._in_flight:
            self.cache.collected(self.scheduler.last_step)
        for finished in outputs.finished:
            self._requests.pop(finished.request_id, None)
        if not (self._requests or self._in_flight) and self.cache.num_free != self.cache.num_usable:
            # Names the blocks that leaked; looking at all of them takes milliseconds.
            self.check_integrity()
        self._outputs, self._changing = StepOutputs(), False
        return outputs

    def _launch(self, step: ScheduledStep, outputs: StepOutputs) -> None:
        begin = self.executor.launch_forward if step.gated else self.executor.launch
        try:
            with span("engine.launch"):
                handle = begin(step.plan)
        except Exception as error:
            self._fail([step], error, outputs)
            return
        self._in_flight.append((step, handle))
        if step.gated:
            self._sample_gated(step, handle, outputs)

    def _sample_gated(self, step: ScheduledStep, handle: Any, outputs: StepOutputs) -> None:
        """While the device is at the forward, read the tokens that the masks follow, and make these."""
        while len(self._in_flight) > 1:
            self._collect(outputs)
        if not self._in_flight:
            return
        running = [(row, request) for row, request in step.gated if request.status is RequestStatus.RUNNING]
        masks, failed = make_masks(running, self.info.vocab_size)
        try:
            self.executor.launch_sample(handle, masks)
        except Exception as error:
            self._in_flight.clear()
            self._fail([step], error, outputs)
        self._end(failed, outputs)

    def _end(self, failed: list[tuple[Request, str]], outputs: StepOutputs) -> None:
        for request, text in failed:
            if request.status is not RequestStatus.FINISHED:
                self.scheduler.finish(request, FinishReason.ERROR, text)
                outputs.end(request)

    def _collect(self, outputs: StepOutputs) -> None:
        step, handle = self._in_flight.popleft()
        try:
            with span("engine.collect"):
                result = self.executor.collect(handle)
        except Exception as error:
            later = [step for step, _ in self._in_flight]
            self._in_flight.clear()
            self._fail([step, *later], error, outputs)
            return
        with span("engine.apply"):
            results.apply_result(self.scheduler, step, result, outputs)
        self.cache.collected(step.plan.step)

    def _fail(self, steps: list[ScheduledStep], error: BaseException, outputs: StepOutputs) -> None:
        text = f"the forward pass raised {type(error).__name__}: {error}"
        logger.error("%s", text, exc_info=error)
        for request in (request for step in steps for request in step.requests):
            if request.status is not RequestStatus.FINISHED:
                self.scheduler.finish(request, FinishReason.ERROR, text)
                outputs.end(request)
        self.cache.uncache_deferred()
        if not self.executor.healthy():
            self._die(text, error)

    def _die(self, text: str, cause: BaseException | None = None) -> None:
        self._dead = f"the engine is dead: {text}"
        raise EngineDeadError(f"the engine cannot go on: {text}") from cause

    def _check_usable(self) -> None:
        if self._dead is not None or self._changing:
            self.start_over()

    def start_over(self) -> None:
        """End all requests in an error, and empty the caches: for when nothing is known of rows and blocks.

        May be cut short itself: it is then done again. EngineDeadError when the device is lost.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self._changing = True
        # Steps in flight write to their blocks until the device is done with them.
        if not self.executor.healthy():
            self._die(INTERRUPTED)
        outputs = StepOutputs()
        for request in self._requests.values():
            if request.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
                # Also of those that have just ended otherwise the last tokens are lost.
                request.finish_reason, request.error = FinishReason.ERROR, INTERRUPTED
            request.status = RequestStatus.FINISHED
            outputs.end(request)
        # What the step had crossed off was not reported either.
        outputs.finished += [
            old if old.reason is FinishReason.ABORT else replace(old, reason=FinishReason.ERROR, error=INTERRUPTED)
            for old in self._outputs.finished
            if old.request_id not in self._requests
        ]
        self._outputs, last_step = outputs, self.scheduler.last_step
        self._begin(last_step)

    def _state(self) -> str:
        free, usable = self.cache.num_free, self.cache.num_usable
        waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
        return f"{waiting} waiting, {running} running, {free} of {usable} blocks free"

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks."""
        self._check_usable()
        self._changing = True
        self.cache.reset_cache()
        self._changing = False

    def check_integrity(self) -> None:
        """AssertionError when a block leaked: every held block must belong to a running request."""
        self.cache.check([request.blocks for request in self.scheduler.running])

    def close(self) -> None:
        """Free model and caches; every call but `abort` and this one raises from now on."""
        self._dead = self._dead or CLOSED
        self.executor.close()
