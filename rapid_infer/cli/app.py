"""The commands, and how errors leave the process. A command module is imported only when it is called or for help."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Annotated, Any

import typer

from rapid_infer.cli import streams
from rapid_infer.errors import EngineDeadError, RapidInferError
from rapid_infer.version import __version__

COMMANDS: dict[str, str] = {
    "generate": "rapid_infer.cli.generate:generate",
    "chat": "rapid_infer.cli.chat:chat",
    "serve": "rapid_infer.cli.serve:serve",
    "models": "rapid_infer.cli.models:models",
    "inspect": "rapid_infer.cli.inspect:inspect",
    "download": "rapid_infer.cli.download:download",
    "verify": "rapid_infer.cli.verify:verify",
    "compare": "rapid_infer.cli.compare:compare",
    "warm-up": "rapid_infer.cli.warm_up:warm_up",
    "doctor": "rapid_infer.cli.doctor:doctor",
    "plugin": "rapid_infer.cli.plugin:plugin",
}
"""Command -> its function, or the Typer app of a group. The first line of its docstring is its line in `--help`."""

USAGE_ERROR: Any = typer.BadParameter.__base__
"""Click's class, or that of typer's own copy of Click."""

EPILOG = """Example: rapid-infer generate -p "The capital of France is"   (no MODEL: a small demo model)

Exit codes: 0 done, 2 something to correct (command line, model, request), 1 a failure, 130 interrupted.
"""


def run(args: list[str]) -> None:
    """Run one command line; leaves by SystemExit, except on an unexpected exception, which keeps its traceback.

    A RapidInferError or a usage error becomes one message on stderr and exit code 2, EngineDeadError and output that
    cannot be written 1; an interrupt 130 and no message.
    """
    streams.prepare()
    sys.exit(streams.written(lambda: _call(args)))


def _call(args: list[str]) -> int:
    try:
        code = build_app(args)(args or ["--help"], prog_name="rapid-infer", standalone_mode=False) or 0
        return code if args else 2
    except SystemExit as left:  # by which rich and typer leave when a pipe is closed
        return int(left.code or 0)
    except RapidInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineDeadError) else 2
    except USAGE_ERROR as error:
        command = f"rapid-infer {args[0]}" if args and args[0] in COMMANDS else "rapid-infer"
        print(f"error: {error.format_message().rstrip('.')}; see `{command} --help`", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def build_app(args: list[str]) -> typer.Typer:
    """The app for this command line: the called command alone, or all of them for help and for unknown names."""
    app = typer.Typer(
        help="Run large language models; every model is a pip-installable plugin.",
        epilog=EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
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
        app.command(name, help=_paragraphs(inspect.getdoc(command) or ""))(command)


def _paragraphs(text: str) -> str:
    """Each on one line: typer keeps the line ends of the source, which fit no terminal."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


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
