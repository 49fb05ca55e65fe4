"""`rapid-infer plugin`: begin a package for a model, and check one that is installed."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rapid_infer.cli import options
from rapid_infer.errors import ConfigError, RapidInferError

plugin = typer.Typer(help="Begin a plugin for a model, and check an installed one.", no_args_is_help=True)


@plugin.command(help="Write a plugin package that works as it stands. Example: rapid-infer plugin new my-model")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder and package will be rapid-infer-NAME.")],
    like: Annotated[str, typer.Option(help="The model to start from: llama or qwen3.", metavar="MODEL")] = "llama",
    architecture: Annotated[
        str | None, typer.Option(help="What config.json calls the model. Default: NameForCausalLM.", metavar="CLASS")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Where to make the folder. Default: here.", metavar="DIR")] = None,
) -> None:
    from rapid_infer.cli.scaffold import write

    folder = write(name, like, architecture, to)
    for file in sorted(folder.rglob("*.*")):
        if file.is_file():
            print(file)
    print(f"\nnext: pip install -e {folder}\n      rapid-infer plugin check {folder.name}")


@plugin.command(help="Compare an installed plugin with its oracle. Example: rapid-infer plugin check rapid-infer-llama")
def check(
    distribution: Annotated[str, typer.Argument(metavar="DIST", help="The package, as pip calls it.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Run the checks with this in their name; repeat.", metavar="TEXT")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Exit code 1 when a check fails; each is printed with what is wrong."""
    from rapid_infer.testing.conformance import cases_of, entries_of, plan, run

    steps = plan(cases_of(entries_of(distribution)))
    rows: list[dict[str, Any]] = []
    for subject, one in steps:
        name = f"{subject.name} {one.__name__}"
        if only and not any(text in name for text in only):
            continue
        said = " ".join((one.__doc__ or "").split())
        fault = note = None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                note = run(subject, one)
        except (AssertionError, RapidInferError) as error:
            fault = str(error)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        rows.append({"architecture": subject.entry.name, "variant": subject.variant, "check": one.__name__})
        rows[-1] |= {"promise": said, "fault": fault, "note": note}
        if not as_json:
            print(
                f"{'FAILED' if fault else 'ok':6}  {name}{': ' if fault or note else ''}{fault or note or ''}",
                flush=True,
            )
    if not rows:
        raise ConfigError(f"no check has {' or '.join(only or ())} in its name; run without --only to see them all")
    failed = sum(row["fault"] is not None for row in rows)
    if as_json:
        print(json.dumps({"distribution": distribution, "ok": not failed, "checks": rows}, indent=2))
    else:
        print(f"{len(rows) - failed} of {len(rows)} checks passed")
    if failed:
        raise typer.Exit(1)
