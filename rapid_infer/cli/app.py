"""The commands, and how errors leave the process. A command module is imported only when it is called or for help."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from rapid_infer.errors import EngineDeadError, RapidInferError
from rapid_infer.version import __version__

COMMANDS: dict[str, str] = {
    "generate": "rapid_infer.cli.generate:generate",
    "chat": "rapid_infer.cli.chat:chat",
    "models": "rapid_infer.cli.models:models",
    "inspect": "rapid_infer.cli.inspect:inspect",
    "download": "rapid_infer.cli.download:download",
    "verify": "rapid_infer.cli.verify:verify",
    "doctor": "rapid_infer.cli.doctor:doctor",
}
"""Command -> its function, or the Typer app of a group. The first line of its docstring is its line in `--help`."""

EXAMPLE = 'Example: rapid-infer generate -p "The capital of France is"   (no MODEL: a small demo model)'


def run(args: list[str]) -> None:
    """Run one command line; leaves by SystemExit, except on an unexpected exception, which keeps its traceback.

    A RapidInferError becomes one message on stderr and exit code 2, EngineDeadError 1; an interrupt 130 and no message.
    """
    try:
        build_app(args)(args, prog_name="rapid-infer")
    except RapidInferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, EngineDeadError) else 2)
    except KeyboardInterrupt:
        sys.exit(130)


def build_app(args: list[str]) -> typer.Typer:
    """The app for this command line: the called command alone, or all of them for help and for unknown names."""
    app = typer.Typer(
        help="Run large language models; every model is a pip-installable plugin.",
        epilog=EXAMPLE,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )
    app.callback()(_global_options)
    called = args[0] if args else ""
    for name, target in COMMANDS.items():
        if called == name or called not in COMMANDS:
            _add(app, name, target)
    return app


def _add(app: typer.Typer, name: str, target: str) -> None:
    module, _, attribute = target.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rapid-infer {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    # Help text comes from the app; a docstring here would replace it.
    del version
