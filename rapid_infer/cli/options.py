"""Options that several commands share, each said once, and how sampling options meet the model's own defaults."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rapid_infer.config import EngineArgs
from rapid_infer.params import SamplingParams, defaults_of

if TYPE_CHECKING:
    from rapid_infer.llm_engine import LLMEngine

Model = Annotated[
    str,
    typer.Argument(
        help="A directory, org/name on a hub, hf:org/name@revision, ms:org/name@revision, a model's page on a hub, or "
        "`demo`, a small model.",
        show_default=True,
    ),
]
HfEndpoint = Annotated[str | None, typer.Option(metavar="URL", help="A mirror of Hugging Face. Default: $HF_ENDPOINT.")]
ModelScopeEndpoint = Annotated[
    str | None, typer.Option(metavar="URL", help="Another ModelScope site. Default: $MODELSCOPE_ENDPOINT.")
]
Offline = Annotated[
    bool,
    typer.Option("--offline", metavar="", help="Open no connection; say what is missing. Default: $HF_HUB_OFFLINE."),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")]
System = Annotated[str | None, typer.Option(help="The system message.", metavar="TEXT")]
NoThinking = Annotated[
    bool, typer.Option("--no-thinking", metavar="", help="Ask the template for answers without thinking.")
]

Options = Mapping[str, inspect.Parameter]


def _table(*options: inspect.Parameter) -> Options:
    return {option.name: option for option in options}


def _option(name: str, kind: Any, help: str, *flags: str, default: Any = None, **shown: Any) -> inspect.Parameter:
    """`flags` where they do not follow from the name. A bool takes no value, and has no --no- form."""
    if kind is bool:
        flags, shown = (f"--{name.replace('_', '-')}",), {"metavar": ""}
    annotation = Annotated[kind, typer.Option(*flags, help=help, **shown)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
_TYPES = get_type_hints(EngineArgs)


def _engine(name: str, help: str, *flags: str) -> inspect.Parameter:
    """Type and default are those of `EngineArgs`."""
    return _option(name, _TYPES[name], help, *flags, default=_DEFAULTS[name])


ENGINE = _table(
    _engine("tensor_parallel_size", "Ranks that share each matrix.", "--tensor-parallel-size", "--tp", "-tp"),
    _engine("expert_parallel_size", "Groups of ranks that share out experts.", "--expert-parallel-size", "--ep", "-ep"),
    _engine("dtype", "auto (as the checkpoint), bfloat16, float16 or float32."),
    _engine("device", "auto (a GPU if there is one), cpu or cuda."),
    _engine("load_format", "auto, or dummy for random weights."),
    _engine("quantization", "Round 16-bit weights while loading: fp8, fp8_row, fp8_block, nvfp4 or mxfp4."),
    _engine("kv_cache_dtype", "How the KV cache is stored: auto (the model's type), bf16, fp8 or nvfp4."),
    _engine("max_model_len", "Longest sequence, prompt and answer. Default: the model's own."),
    _engine("max_num_seqs", "Requests that will run at once."),
    _engine("max_num_batched_tokens", "Tokens of one step."),
    _engine("block_size", "Tokens of one cache block."),
    _engine("enforce_eager", "For steps without graphs."),
    _engine("model_plugin", "Take the model from this package when several offer it."),
    _engine(
        "model_impl", "plugin (made for the model), auto (else one that serves any model), or fallback (that one)."
    ),
    _engine("hub", "auto, huggingface, modelscope, or an order: modelscope,huggingface. auto: $RAPID_INFER_HUB."),
    _engine("revision", "Branch, tag or commit on the hub. Default: the hub's own."),
)
"""Of the engine, as options of commands."""

SAMPLING = _table(
    _option("min_tokens", int | None, "Nothing ends the text before this many tokens."),
    _option("greedy", bool, "The likeliest token each time: temperature 0.", default=False),
    _option("temperature", float | None, "0 is greedy; higher is more varied."),
    _option("top_k", int | None, "Keep the k likeliest tokens; 0: all."),
    _option("top_p", float | None, "Keep the likeliest tokens up to this probability."),
    _option("min_p", float | None, "Keep tokens this likely, relative to the likeliest."),
    _option("repetition_penalty", float | None, "Above 1: tokens seen before get less likely."),
    _option("presence_penalty", float | None, "Above 0: tokens of the text get less likely."),
    _option("frequency_penalty", float | None, "The same, once per time a token was used."),
    _option("stop", list[str] | None, "End before this text; repeat for several.", metavar="TEXT"),
    _option("stop_token_ids", list[str] | None, "End at these token ids too, such as 151643,151645.", metavar="IDS"),
    _option("seed", int | None, "Same seed, same text."),
    _option("n", int, "Completions per prompt.", "-n", default=1),
    _option("ignore_eos", bool, "Go on past the end token.", default=False),
    _option("logprobs", int | None, "With --json: log-probabilities, of the N likeliest tokens too.", metavar="N"),
)
"""Of a request; `max_tokens` is each command's own."""

RUN = (
    "tensor_parallel_size",
    "expert_parallel_size",
    "dtype",
    "device",
    "load_format",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "model_plugin",
    "model_impl",
    "hub",
    "revision",
)
"""What a command that runs a model takes of ENGINE."""


def expand(
    *, engine_args: Iterable[str] = (), sampling: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The command's parameters `engine_args` and `sampling`, dicts, become these options of the two tables, in this
    order.
    """
    groups = {
        "engine_args": [ENGINE[name] for name in engine_args],
        "sampling": [SAMPLING[name] for name in sampling],
    }

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            parameters += groups.get(own.name) or [own.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

        @wraps(command)
        def call(**given: Any) -> Any:
            for group, options in groups.items():
                if options:
                    given[group] = {option.name: given.pop(option.name) for option in options}
            return command(**given)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def go_offline(offline: bool) -> None:
    """For the rest of this process, and for the libraries in it."""
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def template_options(no_thinking: bool) -> dict[str, Any]:
    """What the chat template is given."""
    return {"enable_thinking": False} if no_thinking else {}


def show_memory(engine: LLMEngine) -> None:
    """On a terminal, the arithmetic behind the size of a GPU's cache."""
    memory = getattr(engine.executor, "memory", None)
    if memory is not None and sys.stderr.isatty():
        print(memory, file=sys.stderr)


def sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options that were given, which are those that are not None; `greedy` wins over a temperature.

    RequestError for a value out of range, so that it shows before a model is loaded.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given.pop("greedy"):
        given["temperature"] = 0.0
    SamplingParams.from_dict({"max_tokens": None, **given})
    return given


def sampling_params(engine: LLMEngine, given: dict[str, Any], max_tokens: int) -> SamplingParams:
    """`given` over what the model recommends; `max_tokens` when neither says how long an answer may be."""
    if "max_tokens" not in defaults_of(engine.checkpoint.generation):
        given = {"max_tokens": max_tokens, **given}
    return engine.default_sampling_params(**given)
