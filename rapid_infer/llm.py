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
    manager, or call `close()`, to free the memory.
    """

    def __init__(self, model: str | PathLike[str] = "demo", **kwargs: Any) -> None:
        self.engine = LLMEngine(model, **kwargs)
        self._ids = itertools.count()
        self._inbox: dict[str, deque[RequestOutput]] = {}

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Complete prompts (texts or lists of token ids), all at once; results in the order of the prompts.

        RequestError, before anything runs, when one of them is invalid. A request that fails while running has
        `outputs[i].finish_reason == "error"`; the others are unaffected.
        """
        batch = _as_batch(prompts)
        params = _spread(self.default_sampling_params() if sampling_params is None else sampling_params, len(batch))
        names = [f"generate-{next(self._ids)}" for _ in batch]
        inputs = self.engine.inputs
        try:
            with inputs.forgetting_refused():
                for name, ids, one in zip(names, inputs.encode_all(batch), params):
                    self._add(name, ids, one, RequestOutputKind.FINAL_ONLY)
            while not all(self._inbox[name] for name in names):
                self._step()
            results = [self._inbox[name].popleft() for name in names]
        finally:
            self._abandon(names)
        for result, prompt in zip(results, batch):
            result.prompt = prompt if isinstance(prompt, str) else None
        return results

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
        return self.engine.inputs.encode_chat(messages, **options)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `changes` field by field.

        These are also the parameters of every request that brings none.
        """
        return self.engine.default_sampling_params(**changes)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding what is new after each step. Leaving the loop early ends the request."""
        name = f"stream-{next(self._ids)}"
        self._add(name, prompt, sampling_params, RequestOutputKind.DELTA)
        return self._stream(name)

    def _stream(self, name: str) -> Iterator[RequestOutput]:
        try:
            while True:
                while not self._inbox[name]:
                    self._step()
                output = self._inbox[name].popleft()
                yield output
                if output.finished:
                    return
        finally:
            self._abandon([name])

    def _add(self, name: str, prompt: Prompt, params: SamplingParams | None, kind: RequestOutputKind) -> None:
        self.engine.add_request(name, prompt, params, output_kind=kind)
        self._inbox[name] = deque()

    def _step(self) -> None:
        """One engine step; its outputs wait in the inbox of whoever asked, so that several streams can run at once."""
        for output in self.engine.step():
            if output.request_id in self._inbox:
                self._inbox[output.request_id].append(output)

    def _abandon(self, names: Sequence[str]) -> None:
        """End what is left of these requests, so that the next call starts clean; nothing to do after a normal end."""
        self.engine.discard(names)
        for name in names:
            self._inbox.pop(name, None)

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
