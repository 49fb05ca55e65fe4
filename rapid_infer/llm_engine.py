"""Text in, text out over an `EngineCore` in this process: requests with n completions, step by step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rapid_infer.config import CheckpointFacts, EngineArgs, EngineConfig
from rapid_infer.engine.core import EngineCore
from rapid_infer.engine.request import Request, validate_prompt
from rapid_infer.engine.results import Finished, StepOutputs
from rapid_infer.errors import ConfigError, RequestError
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.registry import ModelRegistry
from rapid_infer.text import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


@dataclass
class _Completion:
    """One of a request's n sequences, as the front sees it."""

    output: CompletionOutput
    detokenizer: Detokenizer | None
    new_ids: list[int] = field(default_factory=list)


@dataclass
class _Parent:
    """A request as the user added it."""

    output: RequestOutput
    kind: RequestOutputKind
    completions: list[_Completion] = field(default_factory=list)
    engine_ids: list[str] = field(default_factory=list)


class LLMEngine:
    """`add_request`, then `step` while `has_unfinished_requests`. Takes the same arguments as `LLM`.

    Errors at construction: ConfigError, PluginError, WeightError, HubError.
    """

    def __init__(self, model: str = "demo", **kwargs: Any) -> None:
        self.args = EngineArgs.from_kwargs(**kwargs)
        self.checkpoint, model_class, self.config = prepare(model, self.args)
        self.tokenizer = None if self.args.skip_tokenizer_init else Tokenizer(self.checkpoint.path)
        from rapid_infer.executors import InProcessExecutor

        for note in self.config.notes:
            logger.info("%s", note)
        self.executor = InProcessExecutor(model_class, self.checkpoint, self.config)
        self.core = EngineCore(self.config, self.executor)
        self.stop_token_ids = self.checkpoint.stop_token_ids
        self._arrivals = 0
        self._parents: dict[str, _Parent] = {}
        self._owner: dict[str, tuple[_Parent, _Completion]] = {}

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. RequestError when it is empty, can never run, or is text and there is no tokenizer."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("got a text prompt, but skip_tokenizer_init=True: give token ids")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = [int(token) for token in prompt]
        validate_prompt(ids, self.core.info.vocab_size, self.core.info.max_model_len)
        return ids

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> None:
        """Queue a request. RequestError, and nothing queued, when it is invalid or the id is in use."""
        params = params or SamplingParams()
        if request_id in self._parents:
            raise RequestError(f"request id {request_id!r} is in use; expected a new one")
        ids = self.encode(prompt)
        parent = _Parent(RequestOutput(request_id, prompt if isinstance(prompt, str) else None, ids, []), output_kind)
        requests = [self._engine_request(request_id, ids, params, index) for index in range(params.n)]
        for request in requests:
            self.core.add_request(request)
        self._arrivals += 1
        self._parents[request_id] = parent
        for index, request in enumerate(requests):
            detokenizer = self.tokenizer.detokenizer() if self.tokenizer is not None else None
            completion = _Completion(CompletionOutput(index), detokenizer)
            parent.output.outputs.append(completion.output)
            parent.completions.append(completion)
            parent.engine_ids.append(request.request_id)
            self._owner[request.request_id] = (parent, completion)

    def _engine_request(self, request_id: str, ids: list[int], params: SamplingParams, index: int) -> Request:
        info = self.core.info
        limit = info.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(ids) + params.max_tokens)
        share: bytes | None = b""
        if not self.config.cache.enable_prefix_caching:
            # Without prefix caching the n rows of one prompt still share its blocks, but only with each other.
            share = f"request {self._arrivals}".encode() if params.n > 1 else None
        stop = (() if params.ignore_eos else self.stop_token_ids) + params.stop_token_ids
        return Request(
            # The arrival keeps apart a discarded request, whose end is still to come, and a new one of the same name.
            request_id=f"{request_id}/{self._arrivals}/{index}",
            prompt_token_ids=ids,
            params=params,
            stop_token_ids=tuple(dict.fromkeys(stop)),
            limit=limit,
            seed=params.seed if params.seed is not None else _mix_seed(self.config.model.seed, self._arrivals),
            sample_index=index,
            share_key=share,
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; unknown ids are ignored. Their last output comes from the next `step`."""
        for request_id in request_ids:
            parent = self._parents.get(request_id)
            if parent is not None:
                self.core.abort(parent.engine_ids)

    def discard(self, request_ids: Iterable[str]) -> None:
        """End these requests without any further output, as for a caller that went away."""
        for request_id in request_ids:
            parent = self._parents.pop(request_id, None)
            if parent is not None:
                self.core.abort(parent.engine_ids)
                for engine_id in parent.engine_ids:
                    self._owner.pop(engine_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._parents)

    def step(self) -> list[RequestOutput]:
        """Run one engine step; returns the requests that got tokens or ended, in the manner of their output kind."""
        touched = self._take(self.core.step())
        outputs = []
        for parent in touched:
            done = parent.output.finished
            if done:
                del self._parents[parent.output.request_id]
            if done or parent.kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(self._output(parent))
        return outputs

    def _take(self, step: StepOutputs) -> list[_Parent]:
        """Hand new tokens and ends to the completions; returns the parents that may have something to say."""
        touched: dict[str, _Parent] = {}
        owners = self._owner
        for request_id, token in zip(step.request_ids, step.token_ids):
            if request_id in owners:
                parent, completion = owners[request_id]
                completion.new_ids.append(token)
                if parent.kind is not RequestOutputKind.FINAL_ONLY:
                    touched[parent.output.request_id] = parent
        for finished in step.finished:
            if finished.request_id in owners:
                parent, completion = owners.pop(finished.request_id)
                self._end(parent, completion, finished)
                touched[parent.output.request_id] = parent
        return list(touched.values())

    def _end(self, parent: _Parent, completion: _Completion, finished: Finished) -> None:
        self._advance(completion)
        output = completion.output
        output.finish_reason, output.error = finished.reason.value, finished.error
        if completion.detokenizer is not None:
            output.text += completion.detokenizer.flush()
        if output.index == 0:
            parent.output.num_cached_tokens = finished.num_cached_tokens

    @staticmethod
    def _advance(completion: _Completion) -> None:
        if completion.new_ids:
            completion.output.token_ids += completion.new_ids
            if completion.detokenizer is not None:
                completion.output.text += completion.detokenizer.add(completion.new_ids)
            completion.new_ids = []

    def _output(self, parent: _Parent) -> RequestOutput:
        for completion in parent.completions:
            self._advance(completion)
        if parent.kind is not RequestOutputKind.DELTA:
            return parent.output
        whole = parent.output
        deltas = [CompletionOutput(c.index, c.text, c.token_ids, c.finish_reason, c.error) for c in whole.outputs]
        for completion in parent.completions:
            output = completion.output
            # The parent keeps only what has not been shown yet; the delta takes it along.
            output.text, output.token_ids = "", []
        return RequestOutput(whole.request_id, whole.prompt, whole.prompt_token_ids, deltas, whole.num_cached_tokens)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.core.reset_prefix_cache()

    def close(self) -> None:
        """Drop model and caches; the engine cannot be used afterwards."""
        self.core.close()


def _mix_seed(seed: int, arrival: int) -> int:
    """A request's own seed from the engine's: distinct per arrival, within 64 signed bits."""
    return (seed * 0x9E3779B97F4A7C15 + arrival * 0xD1B54A32D192ED03 + 2**63) % 2**64 - 2**63


def prepare(model: str, args: EngineArgs) -> tuple[Checkpoint, Any, EngineConfig]:
    """Find the model's files, its plugin class and the engine's configuration; loads no weights."""
    from rapid_infer import hub
    from rapid_infer.device import probe

    checkpoint = read_checkpoint(hub.resolve(model, revision=args.revision, hub=args.hub))
    model_class: Any = ModelRegistry.resolve(checkpoint.architecture, args.model_plugin)
    model_config = model_class.read_config(checkpoint.hf_config)
    for field_name in ("vocab_size", "max_position_embeddings"):
        if not isinstance(getattr(model_config, field_name, None), int):
            raise ConfigError(
                f"{model_class.__name__}.read_config returned no integer {field_name!r}, which the engine needs"
            )
    facts = CheckpointFacts(model_config.max_position_embeddings, checkpoint.dtype)
    return checkpoint, model_class, args.resolve(facts, probe(args.device))
