"""Offline use: a model, prompts, completions."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any

from rapid_infer.errors import RequestError
from rapid_infer.llm_engine import LLMEngine, Prompt
from rapid_infer.outputs import RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, one for each, or None for the model's own defaults."""


class LLM:
    """A loaded model.

    `model` is a local directory, a repository of the hubs such as "Qwen/Qwen3-8B" (docs/downloading.md), or "demo".
    Keyword arguments are those of `EngineArgs` (docs/options.md); an unknown one is a ConfigError. Use it as a context
    manager, or call `close()`, to free the memory; every later call raises EngineDeadError. Several threads may use it
    at once: what they ask for runs together. A process that was forked from this one may not.
    """

    def __init__(self, model: str | PathLike[str] = "demo", **kwargs: Any) -> None:
        self.engine = LLMEngine(model, **kwargs)
        self._ids = itertools.count()

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Complete prompts (texts or lists of token ids), all at once; results in the order of the prompts.

        RequestError, before anything runs, when one of them is invalid. A request that fails while running has
        `outputs[i].finish_reason == "error"`; the others are unaffected.
        """
        batch = _as_batch(prompts)
        params = _spread(self.default_sampling_params() if sampling_params is None else sampling_params, len(batch))
        new = [(f"generate-{next(self._ids)}", prompt, one) for prompt, one in zip(batch, params)]
        results: dict[str, RequestOutput] = {}
        try:
            self.engine.add_requests(
                new, RequestOutputKind.FINAL_ONLY, lambda end: results.setdefault(end.request_id, end)
            )
            while len(results) < len(new):
                self.engine.step()
        finally:
            # What is left after an error or an interrupt.
            self.engine.discard(name for name, _, _ in new if name not in results)
        return [results[name] for name, _, _ in new]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (`[{"role": "user", "content": "..."}]`) or several, by the model's chat template.

        `options` are those of `encode_chat`.
        """
        several = (
            isinstance(messages, Sequence) and bool(messages) and all(isinstance(c, list | tuple) for c in messages)
        )
        conversations: Sequence[Any] = messages if several else [messages]
        return self.generate([self.encode_chat(c, **options) for c in conversations], sampling_params)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template.

        add_generation_prompt     whether the assistant's turn is begun; True unless the last message is continued
        continue_final_message    leave the last message open, for the model to go on with it
        chat_template             another template than the model's own
        chat_template_kwargs      a dict of names that the template reads; they may also be given one by one, such as
                                  `enable_thinking=False` or `tools=[...]`

        RequestError without a tokenizer or a template, for a name that the template does not read, and for messages
        that it refuses.
        """
        self.engine.check_usable()
        return self.engine.inputs.encode_chat(messages, **options)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `changes` field by field.

        These are also the parameters of every request that brings none.
        """
        return self.engine.default_sampling_params(**changes)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding what is new after each step. Leaving the loop early ends the request."""
        name = f"stream-{next(self._ids)}"
        arrived: deque[RequestOutput] = deque()
        stream = self._stream(name, arrived)
        # A generator that was never started would not end its request when it is dropped.
        next(stream)
        self.engine.add_requests([(name, prompt, sampling_params)], RequestOutputKind.DELTA, arrived.append)
        return stream

    def _stream(self, name: str, arrived: deque[RequestOutput]) -> Iterator[RequestOutput]:
        try:
            output = RequestOutput(name, None, [], [])
            while not output.finished:
                yield output
                while not arrived:
                    self.engine.step()
                output = arrived.popleft()
            yield output
        finally:
            self.engine.discard([name])

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and its caches."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _as_batch(prompts: Any) -> list[Prompt]:
    """Each prompt alone. Numbers side by side are one prompt; rows of an array are several."""
    if isinstance(prompts, str):
        return [prompts]
    items = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(items, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise RequestError(f"prompts must be text, token ids, or a list of either, got {type(prompts).__name__}")
    if items and not any(isinstance(item, Sequence) or getattr(item, "ndim", 0) for item in items):
        return [list(items)]
    return list(items)


def _spread(params: Any, n: int) -> list[SamplingParams]:
    if not isinstance(params, list | tuple):
        return [params] * n
    if len(params) != n:
        raise RequestError(f"got {len(params)} sampling_params for {n} prompts; give one for all or one for each")
    return list(params)
