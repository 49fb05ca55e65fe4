"""Text in, text out over an `EngineCore` in this process: requests with n completions, step by step."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rapid_infer.config import CheckpointFacts, EngineArgs, EngineConfig
from rapid_infer.engine.core import EngineCore
from rapid_infer.engine.results import StepOutputs
from rapid_infer.errors import ConfigError
from rapid_infer.frontend import EngineFacts, InputProcessor, OutputProcessor, Prompt
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.outputs import RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams, defaults_of
from rapid_infer.profiling import span, traced
from rapid_infer.registry import Entry, ModelRegistry
from rapid_infer.text import Tokenizer
from rapid_infer.worker.kernel_compiler import KernelCompiler

logger = logging.getLogger(__name__)

__all__ = ["LLMEngine", "Prompt", "build_core", "configure", "engine_facts", "locate"]


class LLMEngine:
    """`add_request`, then `step` while `has_unfinished_requests`. Takes the same arguments as `LLM`.

    Errors at construction: ConfigError, PluginError, WeightError, HubError.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **kwargs: Any) -> None:
        self.args = EngineArgs.from_kwargs(**kwargs)
        self.checkpoint, entry = locate(model, self.args)
        with KernelCompiler(self.checkpoint.path, entry, self.args) as compiler:
            # Before the weights, which take far longer.
            self.tokenizer = None if self.args.skip_tokenizer_init else Tokenizer(self.checkpoint.path)
            self.core, self.config = build_core(self.checkpoint, entry, self.args, compiler)
        self.executor: Any = self.core.executor
        self.inputs = InputProcessor(engine_facts(self.core, self.config, self.checkpoint), self.tokenizer)
        self.outputs = OutputProcessor(self.tokenizer)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `changes` field by field."""
        return SamplingParams.from_dict({**defaults_of(self.checkpoint.generation), **changes})

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, not looked at yet. RequestError when it is text and there is no tokenizer."""
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
        params = self.default_sampling_params() if params is None else params
        self.inputs.check_call(request_id, output_kind, self.outputs)
        ids = self.inputs.encode(prompt)
        with self.inputs.forgetting_refused():
            requests = self.inputs.requests(request_id, ids, params)
            for request in requests:
                self.core.add_request(request)
        output = RequestOutput(request_id, prompt if isinstance(prompt, str) else None, ids, [])
        self.outputs.add(output, params, output_kind, [request.request_id for request in requests])

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; unknown ids are ignored. Their last output comes from the next `step`."""
        self.core.abort(self.outputs.engine_ids(request_ids))

    def discard(self, request_ids: Iterable[str]) -> None:
        """End these requests without any further output, as for a caller that went away."""
        self.core.abort(self.outputs.discard(request_ids))

    def has_unfinished_requests(self) -> bool:
        return len(self.outputs) > 0

    def step(self) -> list[RequestOutput]:
        """Run one engine step; returns the requests that got tokens or ended, in the manner of their output kind."""
        with span("llm_engine.step"):
            return self.take(self.core.step())

    def take(self, step: StepOutputs) -> list[RequestOutput]:
        """Make outputs of an engine step, and end what a stop string has ended."""
        with span("frontend.outputs"):
            outputs, stopped = self.outputs.process(step)
            self.core.abort(stopped)
            return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.core.reset_prefix_cache()

    def close(self) -> None:
        """Drop model and caches; the engine cannot be used afterwards."""
        self.core.close()


@traced("llm_engine.locate")
def locate(model: str | os.PathLike[str], args: EngineArgs) -> tuple[Checkpoint, Entry]:
    """The model's files, and the plugin entry that serves them; imports no plugin and loads no weights."""
    from rapid_infer import hub

    if isinstance(model, os.PathLike):
        # A path never means a name on a hub.
        path = os.path.abspath(model)
        if not os.path.isdir(path):
            raise ConfigError(f"model {os.fspath(model)!r} is a path, but no directory is there: give text for a hub")
        model = path
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be a directory, a name such as 'Qwen/Qwen3-8B', or 'demo', got {model!r:.80}")
    checkpoint = read_checkpoint(hub.resolve(model, revision=args.revision, hub=args.hub))
    return checkpoint, ModelRegistry.lookup(checkpoint.architecture, args.model_plugin)


@traced("llm_engine.configure")
def configure(checkpoint: Checkpoint, entry: Entry, args: EngineArgs) -> tuple[Any, EngineConfig]:
    """The plugin's model class and the engine's configuration, every "auto" decided."""
    with span("llm_engine.imports"):
        from rapid_infer.device import probe
        from rapid_infer.worker.contract import check_class, read_config

        model_class = ModelRegistry.load(entry)
        check_class(model_class, entry)
    with span("llm_engine.device"):
        device = probe(args.device)
    with span("llm_engine.config"):
        model_config = read_config(model_class, checkpoint)
    facts = CheckpointFacts(model_config.max_position_embeddings, checkpoint.dtype)
    return model_class, args.resolve(facts, device)


def build_core(
    checkpoint: Checkpoint, entry: Entry, args: EngineArgs, compiler: KernelCompiler
) -> tuple[EngineCore, EngineConfig]:
    """A loaded model in this process, with the engine that drives it."""
    with _all_kept():
        model_class, config = configure(checkpoint, entry, args)
        for note in config.notes:
            logger.info("%s", note)
        from rapid_infer.executors import InProcessExecutor

        core = EngineCore(config, InProcessExecutor(model_class, checkpoint, config, compiler))
    return core, config


@contextmanager
def _all_kept() -> Iterator[None]:
    """What is made inside stays for good: keep the garbage collector from walking over it again and again.

    That is a tenth of a start, and would be 3 % of a small model's time afterwards.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
    gc.collect()
    gc.freeze()


def engine_facts(core: EngineCore, config: EngineConfig, checkpoint: Checkpoint) -> EngineFacts:
    """What a front must know of this engine."""
    return EngineFacts(
        architecture=core.info.architecture,
        dtype=core.info.dtype,
        device=config.device,
        vocab_size=core.info.vocab_size,
        max_model_len=core.info.max_model_len,
        stop_token_ids=checkpoint.stop_token_ids,
        seed=config.model.seed,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
