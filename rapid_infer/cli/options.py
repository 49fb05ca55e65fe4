"""Options that several commands share, and how sampling options meet the model's own defaults."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
Hub = Annotated[
    str,
    typer.Option(help="auto, huggingface, modelscope, or an order: modelscope,huggingface. auto: $RAPID_INFER_HUB."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub. Default: the hub's own.")]
HfEndpoint = Annotated[str | None, typer.Option(metavar="URL", help="A mirror of Hugging Face. Default: $HF_ENDPOINT.")]
ModelScopeEndpoint = Annotated[
    str | None, typer.Option(metavar="URL", help="Another ModelScope site. Default: $MODELSCOPE_ENDPOINT.")
]
Offline = Annotated[
    bool,
    typer.Option("--offline", metavar="", help="Open no connection; say what is missing. Default: $HF_HUB_OFFLINE."),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")]
Dtype = Annotated[str, typer.Option(help="auto (as the checkpoint), bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence, prompt and answer. Default: the model's own.")]
ModelPlugin = Annotated[str | None, typer.Option(help="Take the model from this package when several offer it.")]
ModelImpl = Annotated[
    str,
    typer.Option(help="plugin (made for the model), auto (else one that serves any model), or fallback (that one)."),
]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights.")]

Greedy = Annotated[bool, typer.Option("--greedy", metavar="", help="The likeliest token each time: temperature 0.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; higher is more varied.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens this likely, relative to the likeliest.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: tokens seen before get less likely.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]

System = Annotated[str | None, typer.Option(help="The system message.", metavar="TEXT")]
NoThinking = Annotated[
    bool, typer.Option("--no-thinking", metavar="", help="Ask the template for answers without thinking.")
]


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


def sampling_options(greedy: bool, **options: Any) -> dict[str, Any]:
    """The sampling options that were given, which are those that are not None; `greedy` wins over a temperature.

    RequestError for a value out of range, so that it shows before a model is loaded.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if greedy:
        given["temperature"] = 0.0
    SamplingParams.from_dict({"max_tokens": None, **given})
    return given


def sampling_params(engine: LLMEngine, given: dict[str, Any], max_tokens: int) -> SamplingParams:
    """`given` over what the model recommends; `max_tokens` when neither says how long an answer may be."""
    if "max_tokens" not in defaults_of(engine.checkpoint.generation):
        given = {"max_tokens": max_tokens, **given}
    return engine.default_sampling_params(**given)
