"""What all handlers share: the engine, the settings, the counts, and whether requests are taken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rapid_infer.async_llm import AsyncLLM, Stream
from rapid_infer.errors import EngineDeadError
from rapid_infer.ipc.messages import Stats
from rapid_infer.outputs import RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.server.errors import ApiError, invalid
from rapid_infer.server.http import Exchange
from rapid_infer.server.metrics import IN_FLIGHT, Metrics
from rapid_infer.server.parsers import choose_reasoning, choose_tools
from rapid_infer.server.settings import ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters beyond which a text is tokenized in a thread, while the event loop serves others."""

TICK = 0.5


class Served:
    """One front's view of the engine. `tick` is to run beside the server."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, metrics: Metrics) -> None:
        self.llm, self.settings, self.metrics = llm, settings, metrics
        self.model = settings.served_names[0]
        self.created = int(time.time())
        self.draining = False
        self.profiling = False
        self.stats: Stats | None = None
        self.exchanges: dict[Exchange, None] = {}
        self._heard = time.monotonic()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        tokenizer = llm.tokenizer
        template = "" if tokenizer is None else tokenizer.chat_template
        self.tool_parser = choose_tools(settings.tool_parser, template, llm.info.tool_parser)
        self.reasoning_parser = choose_reasoning(settings.reasoning_parser, template, llm.info.reasoning_parser)
        self._tags: dict[str, int] = {} if tokenizer is None else tokenizer.tag_tokens
        self.special_tokens: dict[str, int] = {} if tokenizer is None else tokenizer.special_tokens

    @property
    def info(self) -> Any:
        return self.llm.info

    def template_names(self) -> frozenset[str]:
        """What the chat template reads."""
        tokenizer = self.llm.tokenizer
        return frozenset() if tokenizer is None else tokenizer.template_names()

    def tag_ids(self, tag: str) -> list[int]:
        """The tokens of a tag."""
        tokenizer = self.llm.tokenizer
        return [] if tokenizer is None else tokenizer.encode_rendered(tag)

    def literal(self, text: str) -> str:
        """A text in a Lark grammar; a tag that is a token by its id."""
        found = self._tags.get(text)
        return json.dumps(text, ensure_ascii=False) if found is None else f"<[{found}]>"

    def health(self) -> str | None:
        """What is wrong with the engine, or None."""
        if not self.llm.is_running:
            return str(self.llm.dead_error or "the engine process has ended")
        silent = time.monotonic() - self._heard
        if silent > self.settings.health_timeout:
            return f"the engine has said nothing for {silent:.0f} s"
        return None

    async def tick(self) -> None:
        """Asks the engine for its counts again and again; returns when it is dead."""
        while True:
            try:
                self.stats = await self.llm.stats()
                self._heard = time.monotonic()
            except EngineDeadError:
                return
            await asyncio.sleep(TICK)

    def let_go_of_stuck(self) -> None:
        """Ends exchanges whose client has taken nothing for too long."""
        latest = time.monotonic() - self.settings.write_timeout
        for exchange in list(self.exchanges):
            if exchange.stuck_since is not None and exchange.stuck_since < latest:
                exchange.leave()

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """`work()`, in a thread when it is about a text of many characters."""
        if size <= LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def admit(self, num_sequences: int) -> None:
        """ApiError when no more requests are taken, and for one that is more than the queue can ever hold."""
        most = self.settings.max_queue + self.info.max_num_seqs
        if num_sequences > most:
            raise invalid("n", f"{num_sequences} completions in one request; this server takes at most {most}")
        if self.draining:
            raise ApiError(503, "the server is shutting down", headers=(("retry-after", "5"),))
        waiting = self.metrics.total(IN_FLIGHT) - self.info.max_num_seqs
        if waiting >= self.settings.max_queue:
            raise ApiError(
                429,
                f"{waiting:.0f} completions wait already, and the server keeps at most {self.settings.max_queue} "
                "waiting: try again later",
                headers=(("retry-after", "1"),),
            )

    @contextlib.contextmanager
    def request(
        self, ids: list[int], params: SamplingParams, kind: RequestOutputKind
    ) -> Iterator[tuple[Stream, Timeline]]:
        """Queue a prompt; leaving the block ends it in the engine. RequestError, EngineDeadError."""
        with self.llm.open(ids, params, output_kind=kind) as stream:
            timeline = Timeline(self.metrics, len(ids), params.n, kind is RequestOutputKind.DELTA)
            try:
                yield stream, timeline
            finally:
                timeline.end()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Timeline:
    """When a prompt's tokens came, for the metrics."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, n: int, streamed: bool) -> None:
        self._metrics, self._n, self._streamed = metrics, n, streamed
        self.began = time.perf_counter()
        self.first: float | None = None
        self._last = 0.0
        self.num_prompt_tokens, self.num_tokens, self.num_cached_tokens = num_prompt_tokens, 0, 0
        self._ended = 0
        metrics.add(IN_FLIGHT, n)

    def add(self, output: RequestOutput) -> None:
        """What has arrived. All of it counts as of now."""
        metrics = self._metrics
        count = 0
        for one in output.outputs:
            count += len(one.token_ids)
            if one.finish_reason is not None:
                self._ended += 1
                metrics.finished(one.finish_reason)
        self.num_tokens += count
        self.num_cached_tokens = output.num_cached_tokens
        metrics.add("vllm:generation_tokens_total", count)
        if self._streamed and count:
            now = time.perf_counter()
            if self.first is None:
                self.first = now
                metrics.observe("vllm:time_to_first_token_seconds", now - self.began)
            else:
                metrics.observe("vllm:inter_token_latency_seconds", now - self._last)
            self._last = now

    def end(self) -> None:
        metrics = self._metrics
        metrics.add(IN_FLIGHT, -self._n)
        for _ in range(self._n - self._ended):
            metrics.finished("abort")
        metrics.add("vllm:prompt_tokens_total", self.num_prompt_tokens)
        metrics.add("vllm:prefix_cache_queries_total", self.num_prompt_tokens)
        metrics.add("vllm:prefix_cache_hits_total", self.num_cached_tokens)
        metrics.observe("vllm:request_prompt_tokens", self.num_prompt_tokens)
        metrics.observe("vllm:request_generation_tokens", self.num_tokens)
        metrics.observe("vllm:request_params_n", self._n)
        metrics.observe("vllm:e2e_request_latency_seconds", time.perf_counter() - self.began)
        if self.first is not None and self.num_tokens > self._n:
            gap = (self._last - self.first) / (self.num_tokens / self._n - 1)
            metrics.observe("vllm:request_time_per_output_token_seconds", gap)
