"""`rapid-infer models`: what is installed, and with `--check` what is wrong with it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rapid_infer import registry
from rapid_infer.errors import PluginError
from rapid_infer.registry import API_VERSION, Entry, EntryPointTable, ModelTable
from rapid_infer.version import __version__


@dataclass(frozen=True)
class Finding:
    """One result of `--check`; all kinds but `note` mean that something is broken."""

    kind: Literal["broken", "clash", "stale", "unreadable", "note"]
    message: str
    architecture: str | None = None
    distribution: str | None = None


def models(
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")] = False,
    check: Annotated[bool, typer.Option("--check", metavar="", help="Import every model, report the broken.")] = False,
) -> None:
    """List the installed models; --check shows what is broken and why.

    Listing runs no plugin code.
    With --check the exit code is 1 when something is broken: a model that cannot be imported or does not have
    what the runtime calls, a plugin that asks for another rapid-infer, two plugins for one architecture, stale or
    unreadable metadata.
    """
    table = registry.ModelRegistry
    findings = _check_with_progress(table) if check else None
    broken = [finding for finding in findings or [] if finding.kind != "note"]
    if as_json:
        print(json.dumps(_report(table, findings), indent=2))
    else:
        _print_table(table, findings)
    if broken:
        raise typer.Exit(1)


def _check_with_progress(table: ModelTable) -> list[Finding]:
    from rich.console import Console

    with Console(stderr=True).status("Importing every model"):  # shows only on a terminal
        return list(check_models(table))


def check_models(table: ModelTable) -> Iterator[Finding]:
    """Import and look at every class, compare metadata with what it was made from; a broken plugin raises nothing."""
    for name in table.names():
        candidates = table.candidates(name)
        if len(candidates) > 1:
            yield Finding("clash", _error_of(partial(table.lookup, name)), name)
        for entry in candidates:
            if entry.fault:  # reported below, once for the distribution
                continue
            with contextlib.redirect_stdout(sys.stderr):  # a plugin that prints must not end up in the JSON
                error = _error_of(partial(_load, table, entry))
            if error:
                yield Finding("broken", error, name, entry.distribution)
    yield from (Finding("unreadable", fault) for fault in table.faults())
    yield from _duplicates(table)
    yield from _outdated_sources(table)


def _load(table: ModelTable, entry: Entry) -> None:
    from rapid_infer.worker.contract import check_class

    check_class(table.load(entry), entry)


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except PluginError as error:
        return str(error)
    return ""


def _duplicates(table: EntryPointTable) -> Iterator[Finding]:
    """Distributions found more than once where at least one copy declares models."""
    for used, hidden in table.duplicates():
        # One folder may be on the path twice, also through a link.
        one_folder = os.path.realpath(used.location) == os.path.realpath(hidden.location)
        if one_folder or not (used.targets or hidden.targets):
            continue
        what = f"{hidden.name} is found twice: {used.location} is used and hides {hidden.location}"
        if used.targets == hidden.targets:
            yield Finding("note", f"{what}; both declare the same models", distribution=hidden.name)
        else:
            advice = "they declare different models; delete the older of the two folders, or reinstall the package"
            yield Finding("stale", f"{what}; {advice}", distribution=hidden.name)


def _outdated_sources(table: EntryPointTable) -> Iterator[Finding]:
    """An editable install keeps the entry points it was installed with, whatever its pyproject.toml says since."""
    installed: dict[tuple[str, str], dict[str, str]] = {}
    for entry in table.entries():
        if entry.distribution:
            installed.setdefault((entry.distribution, entry.location), {})[entry.name] = entry.target
    for (distribution, location), targets in installed.items():
        project = _source_project(Path(location))
        declared = _declared(project, distribution, table.group) if project else None
        if project and declared is not None and declared != targets:
            names = ", ".join(sorted(dict(declared.items() ^ targets.items())))
            message = f"{distribution}: {project} and the installed metadata {location} differ in {names}"
            yield Finding("stale", f"{message}; reinstall it: `pip install -e {project.parent}`", None, distribution)


def _source_project(location: Path) -> Path | None:
    """The pyproject.toml that editable metadata was made from: named by direct_url.json, or above an egg-info."""
    from urllib.parse import unquote, urlsplit

    folders = [location.parent, location.parent.parent] if location.suffix == ".egg-info" else []
    try:
        direct = json.loads((location / "direct_url.json").read_text())
        if direct.get("dir_info", {}).get("editable"):
            folders.append(Path(unquote(urlsplit(direct["url"]).path)))
    except (OSError, ValueError, KeyError, AttributeError):
        pass  # no such file, or not the format that pip writes: then the folder is not known
    return next((folder / "pyproject.toml" for folder in folders if (folder / "pyproject.toml").is_file()), None)


def _declared(project: Path, distribution: str, group: str) -> dict[str, str] | None:
    import tomllib

    try:
        table = tomllib.loads(project.read_text())["project"]
        if table["name"] != distribution or "entry-points" in table.get("dynamic", []):
            return None
        return table.get("entry-points", {}).get(group, {})
    except (OSError, ValueError, KeyError):
        return None


def _report(table: EntryPointTable, findings: list[Finding] | None) -> dict[str, Any]:
    rows = [
        _row(entry) | ({} if findings is None else {"status": _status(entry, findings)}) for entry in table.entries()
    ]
    report: dict[str, Any] = {"version": __version__, "api_version": API_VERSION, "models": rows}
    if findings is not None:
        report["ok"] = all(finding.kind == "note" for finding in findings)
        report["findings"] = [asdict(finding) for finding in findings]
    return report


def _row(entry: Entry) -> dict[str, str | None]:
    return {
        "architecture": entry.name,
        "target": entry.target,
        "distribution": entry.distribution,
        "version": entry.version,
        "source": entry.source,
    }


def _status(entry: Entry, findings: list[Finding]) -> str:
    about = [finding for finding in findings if finding.architecture == entry.name]
    if entry.fault or any(f.kind == "broken" and f.distribution == entry.distribution for f in about):
        return "broken"
    return "clash" if about and any(f.kind == "clash" for f in about) else "ok"


def _print_table(table: EntryPointTable, findings: list[Finding] | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # a pipe has no width: nothing is wrapped or cut
    entries = table.entries()
    if not entries:
        print("No model plugin is installed. Install one, for example: pip install rapid-infer-llama")
    else:
        columns = ["architecture", "target", "distribution", "version"] + ([] if findings is None else ["check"])
        rows = Table(*columns, box=None, header_style="bold", pad_edge=False)
        for column in rows.columns:
            column.overflow = "fold"
        for entry in entries:
            cells = [entry.name, entry.target, entry.distribution or "registered here", entry.version or ""]
            status = [] if findings is None else [_status(entry, findings)]
            rows.add_row(*map(Text, cells + status), style="red" if status and status != ["ok"] else None)
        console.print(rows)
    for finding in findings or []:
        print(f"{finding.kind}: {finding.message}")
    if findings is None and _needs_check(table):
        print("Something is wrong with these plugins; see: rapid-infer models --check")


def _needs_check(table: EntryPointTable) -> bool:
    """Whether the metadata alone shows a fault, so that a plain listing does not look healthy."""
    clash = len({entry.name for entry in table.entries()}) < len(table.entries())
    return clash or bool(table.faults()) or any(twice.kind == "stale" for twice in _duplicates(table))
