"""`rapid-infer verify`: are a directory's files what they should be?"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rapid_infer.cli import options
from rapid_infer.cli.tables import console, print_table, size_text

if TYPE_CHECKING:
    from rapid_infer.hub import Verification


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `download` made, or any other.")],
    against: Annotated[
        str | None,
        typer.Option(metavar="REF", help="Compare with hf:org/name or ms:org/name instead of the directory's lock."),
    ] = None,
    hf_endpoint: options.HfEndpoint = None,
    modelscope_endpoint: options.ModelScopeEndpoint = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare every file's digest. Example: rapid-infer verify models/Qwen3-0.6B --against ms:Qwen/Qwen3-0.6B

    Reads each file once. Without --against it needs no network: rapid-infer.lock.json has the digests. The exit code
    is 1 when a file differs or is missing.
    """
    from rapid_infer import hub

    endpoints = hub.Endpoints(hf_endpoint, modelscope_endpoint)
    if sys.stderr.isatty() and not as_json:
        done = hub.verify(
            directory,
            against=against,
            endpoints=endpoints,
            watch=lambda finding: print(f"{finding.state:8} {finding.path}", file=sys.stderr),
        )
    else:
        done = hub.verify(directory, against=against, endpoints=endpoints)
    if as_json:
        print(json.dumps({**asdict(done), "directory": str(directory), "ok": done.ok}, indent=2))
    else:
        _print(done)
    if not done.ok:
        raise typer.Exit(1)


def _print(done: Verification) -> None:
    out = console()
    different = [f for f in done.findings if f.state in ("differs", "missing")]
    if different:
        rows = [(f.path, f.state, f.algorithm, f.expected, f.actual) for f in different]
        print_table(out, rows, columns=["file", "state", "algorithm", "expected", "actual"])
    for state, where in (("extra", "here"), ("absent", "there")):
        if names := [f.path for f in done.findings if f.state == state]:
            out.print(f"only {where}, not compared: {', '.join(names)}", markup=False, soft_wrap=True)
    counts = Counter(finding.state for finding in done.findings)
    size = sum(finding.size for finding in done.findings if finding.state == "equal")
    verdict = f"{counts['equal']} files ({size_text(size)}) are equal to {done.against}"
    if different:
        verdict += f"; {counts['differs']} differ, {counts['missing']} are missing"
        verdict += ": remove them and run `rapid-infer download` again"
    out.print(verdict, markup=False, soft_wrap=True)
