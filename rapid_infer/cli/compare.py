"""`rapid-infer compare`: where two runs of one prompt part, layer by layer and token by token."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rapid_infer.cli import options
from rapid_infer.cli.tables import console, print_table
from rapid_infer.errors import ConfigError

if TYPE_CHECKING:
    from rapid_infer.testing.layer_outputs import Difference
    from rapid_infer.testing.traced_run import TracedRun
    from rapid_infer.text import Tokenizer

TRANSFORMERS = "transformers"
EXACT, ROUNDED = 1e-3, 5e-2
"""Tolerances, relative to the values of a token: rounding in fp32, and in 16 bits over some dozens of layers."""
WORDS = {"true": True, "false": False, "none": None}


@options.expand(engine_args=("dtype", "device", "quantization", "model_plugin", "model_impl", "hub", "revision"))
def compare(
    *,
    a: Annotated[str, typer.Argument(metavar="A", help="A model, as for `generate`.")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="Another one, or `transformers`, which runs A on the CPU. Default: A."),
    ] = None,
    a_option: Annotated[
        list[str] | None, typer.Option("--a", help="An engine option of A alone; repeat.", metavar="NAME=VALUE")
    ] = None,
    b_option: Annotated[
        list[str] | None, typer.Option("--b", help="An engine option of B alone; repeat.", metavar="NAME=VALUE")
    ] = None,
    engine_args: dict[str, Any],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The text to run, by A's tokenizer.", metavar="TEXT")
    ] = "The capital of France is",
    prompt_token_ids: Annotated[
        str | None, typer.Option(help="Token ids instead, such as 12,7,9; no tokenizer is needed.", metavar="IDS")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens to compare.")] = 16,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative; default 0.001 where both runs are in float32, else 0.05.")
    ] = None,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Run one prompt twice, show where layers and tokens differ. Example: rapid-infer compare demo transformers

    The runs differ by their models, or by --a and --b: `compare demo --b dtype=bfloat16`,
    `--b quantization=fp8`, `--b device=cpu`, `--b op_priority.paged_attention=torch`. One after the other they run
    the whole prompt, then greedy tokens. For every layer: the largest difference of its output, and that relative to
    the largest value of the same token. Exit code 1 when a place is beyond the tolerance or a token differs.
    """
    from rapid_infer.testing.layer_outputs import differences, first_beyond

    options.go_offline(offline)
    with contextlib.redirect_stdout(sys.stderr):
        ids, tokenizer, runs = _runs(a, b or a, prompt, prompt_token_ids, max_tokens, engine_args, a_option, b_option)
    one, other = runs
    found = differences(one.outputs, other.outputs)
    limit = tolerance if tolerance is not None else ROUNDED if one.rounded or other.rounded else EXACT
    report = {
        "a": one.title,
        "b": other.title,
        "prompt_token_ids": ids,
        "tolerance": limit,
        "layers": [dataclasses.asdict(place) for place in found],
        "first_diverging": first_beyond(found, limit),
        "tokens": {"a": one.tokens, "b": other.tokens},
        "first_different_token": first_different(one.tokens, other.tokens),
    }
    report["alike"] = report["first_diverging"] is None and report["first_different_token"] is None
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, found, runs, tokenizer)
    if not report["alike"]:
        raise typer.Exit(1)


def _runs(
    a: str,
    b: str,
    prompt: str,
    prompt_token_ids: str | None,
    max_tokens: int,
    shared: Mapping[str, Any],
    a_option: Sequence[str] | None,
    b_option: Sequence[str] | None,
) -> tuple[list[int], Tokenizer | None, tuple[TracedRun, TracedRun]]:
    """Ids of the prompt, what made them of a text, both runs. Only one model is in memory at a time."""
    from rapid_infer import hub
    from rapid_infer.models.checkpoint import read_checkpoint
    from rapid_infer.testing.traced_run import trace_engine, trace_transformers
    from rapid_infer.text import Tokenizer

    own, others = parse_options(a_option or ()), parse_options(b_option or ())
    if b == TRANSFORMERS and set(others) - {"dtype"}:
        raise ConfigError(f"--b {', '.join(others)}: transformers takes dtype alone; give the others with --a")
    options_of_a = {**shared, **own}
    path = hub.resolve(a, revision=options_of_a["revision"], hub=options_of_a["hub"])
    stop = read_checkpoint(path).stop_token_ids
    tokenizer = Tokenizer(path) if prompt_token_ids is None else None
    if tokenizer is None:
        ids = _ids(prompt_token_ids or "")
    else:
        ids, stop = tokenizer.encode(prompt), (*stop, *tokenizer.stop_token_ids)
    first = trace_engine(a, ids, max_tokens, stop, **options_of_a)
    if b == TRANSFORMERS:
        second = trace_transformers(path, ids, max_tokens, stop, **others)
    else:
        second = trace_engine(b, ids, max_tokens, stop, **{**shared, **others})
    return ids, tokenizer, (first, second)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--prompt-token-ids: expected numbers with commas such as 12,7,9, got {text!r}") from None


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` each; `op_priority.OP=PROVIDER,...` is one of a dict. ConfigError for another form."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name, _, op = name.strip().replace("-", "_").partition(".")
        if not (name and equals and value) or bool(op) != (name == "op_priority"):
            raise ConfigError(
                f"engine option {text!r}: expected NAME=VALUE, such as dtype=float32 or op_priority.linear=torch"
            )
        if op:
            found.setdefault(name, {})[op] = value.split(",")
        else:
            found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def first_different(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which the tokens differ, or one run has none any more."""
    places = range(max(len(a), len(b)))
    return next((i for i in places if list(a[i : i + 1]) != list(b[i : i + 1])), None)


def _print(
    report: dict[str, Any], found: Sequence[Difference], runs: Sequence[TracedRun], tokenizer: Tokenizer | None
) -> None:
    out = console()
    print_table(out, [("A", report["a"]), ("B", report["b"]), ("prompt", f"{len(report['prompt_token_ids'])} tokens")])
    place = report["first_diverging"]
    if found:
        parts = [one for one in found if one.place.count(".") < 2 or (place and shares_layer(one.place, place))]
        rows = [
            (one.place, f"{one.max_abs:.3g}", f"{one.relative:.3g}", "first beyond" if one.place == place else "")
            for one in parts
        ]
        print_table(out, rows, columns=["output of", "largest difference", "relative", ""])
        said = (
            f"all within {report['tolerance']:g}" if place is None else f"first beyond {report['tolerance']:g}: {place}"
        )
    else:
        said = "not seen: they run in other processes, or in CUDA graphs"
    out.print(f"layers: {said}\n", markup=False)
    first = report["first_different_token"]
    lines = []
    for i in range(max(len(run.tokens) for run in runs)):
        cells = [_token(run, i, tokenizer) for run in runs]
        lines.append((str(i), *cells, "first that differs" if i == first else ""))
    print_table(out, lines, columns=["token", "A (gap to the second best)", "B", ""])
    out.print("tokens: equal" if first is None else f"tokens: differ from number {first} on", markup=False)


def _token(run: TracedRun, i: int, tokenizer: Tokenizer | None) -> str:
    if i >= len(run.tokens):
        return "(ended)"
    token, gap = run.tokens[i], run.gap(i)
    text = "" if tokenizer is None else f" {tokenizer.decode([token])!r}"
    return f"{token}{text}" + ("" if gap is None else f" ({gap:.3g})")


def shares_layer(place: str, other: str) -> bool:
    return place.split(".")[:2] == other.split(".")[:2]
