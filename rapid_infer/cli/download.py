"""`rapid-infer download`: a model from Hugging Face or ModelScope, verified file by file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rapid_infer.cli import options
from rapid_infer.cli.tables import console, print_table, size_text

if TYPE_CHECKING:
    from rapid_infer.hub import Download


@options.expand(engine_args=("hub", "revision"))
def download(
    *,
    ref: Annotated[str, typer.Argument(metavar="REF", help="org/name, hf:org/name@revision or ms:org/name@revision.")],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to put it. Default: the cache.")] = None,
    engine_args: dict[str, Any],
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Take the files that match, such as '*.json', instead; repeat for several."
        ),
    ] = None,
    hf_endpoint: options.HfEndpoint = None,
    modelscope_endpoint: options.ModelScopeEndpoint = None,
    offline: Annotated[
        bool, typer.Option("--offline", metavar="", help="Open no connection; say whether everything is there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", metavar="", help="Only list what would be fetched.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", metavar="", help="In DIR, replace files of another model and files that were changed."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Download a model and verify every file. Example: rapid-infer download Qwen/Qwen3-0.6B

    Asks the hub what the revision means now, fetches what is missing, and takes up again what was interrupted. Takes
    safetensors (else .bin), configuration, tokenizer and chat templates. The directory is printed when it is done.
    """
    from rapid_infer import hub as hubs

    done = hubs.fetch(
        ref,
        to=to,
        **engine_args,
        include=tuple(include or ()),
        endpoints=hubs.Endpoints(hf_endpoint, modelscope_endpoint),
        dry_run=dry_run,
        offline=offline or None,
        force=force,
    )
    if as_json:
        print(json.dumps(_report(done), indent=2))
    elif dry_run:
        _print_plan(done)
    else:
        print(_summary(done), file=sys.stderr)
        print(done.directory)


def _report(done: Download) -> dict[str, Any]:
    report = {**asdict(done), "directory": str(done.directory)}
    report["files"] = [{**file, "fetched": file["path"] in done.fetched} for file in report["files"]]
    return report | {"bytes": sum(file.size for file in done.files)}


def _summary(done: Download) -> str:
    size = sum(file.size for file in done.files)
    fetched = sum(file.size for file in done.files if file.path in done.fetched)
    return (
        f"{done.reason}; revision {done.revision} = {done.commit[:12]}; {len(done.files)} files, {size_text(size)}; "
        f"fetched {len(done.fetched)} files, {size_text(fetched)}"
    )


def _print_plan(done: Download) -> None:
    rows = [
        (file.path, f"{file.size:,}", file.algorithm, file.digest, "fetch" if file.path in done.fetched else "there")
        for file in done.files
    ]
    out = console()
    print_table(out, rows, columns=["file", "bytes", "algorithm", "digest", "state"], title=str(done.directory))
    out.print(_summary(done).replace("; fetched ", "; would fetch "), markup=False, soft_wrap=True)
