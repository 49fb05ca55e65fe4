"""`rapid-infer doctor`: the machine, the plugins and what is wrong with them, the operators and what runs, the hubs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rapid_infer.cli import options
from rapid_infer.cli.tables import console, print_table, size_text

GROUPS = ("ops", "quantization", "tool_parsers", "reasoning_parsers")
"""Entry-point groups beside that of the models, `rapid_infer.*`."""


@options.expand(engine_args=("dtype",))
def doctor(
    *,
    as_json: options.AsJson = False,
    engine_args: dict[str, Any],
    offline: options.Offline = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", metavar="", help="Run no model; providers are then not counted.")
    ] = False,
) -> None:
    """Say what is here, what is broken, and which operator implementations run. Exit code 1 when something is broken.

    Imports every plugin, runs every installed model at tiny sizes with random weights to count what runs, and asks
    the hubs, or the mirrors that the environment names, for an answer (--offline does not). Downloads nothing.
    """
    from rich.console import Console

    options.go_offline(offline)
    with Console(stderr=True).status("Looking at everything"):  # shows only on a terminal
        report = diagnose(run=not no_run, **engine_args)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if report["problems"]:
        raise typer.Exit(1)


def diagnose(dtype: str = "auto", run: bool = True) -> dict[str, Any]:
    """The report as plain data; ConfigError for an unknown dtype.

    `ops`: per op and provider the reasons why it cannot run on the default device, and its calls in the trial runs.
    `problems`: a line for each thing that is broken; a hub that does not answer is none.
    """
    import torch

    from rapid_infer.cli.environment import environment
    from rapid_infer.cli.trial_runs import trial_runs
    from rapid_infer.config import DTYPES, EngineArgs
    from rapid_infer.device import probe
    from rapid_infer.hub.choose import is_offline
    from rapid_infer.hub.reachability import reachability
    from rapid_infer.ops import OPS, OpInfo

    EngineArgs.from_kwargs(dtype=dtype)
    device = probe()
    name = DTYPES.get(dtype, "bfloat16" if device.bfloat16 else "float32")
    info = OpInfo.of(device.type, getattr(torch, name))
    with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints must not end up in the JSON
        plugins, problems = _plugins()
        sound = [one["name"] for one in plugins if one["group"] == "models" and one["name"] != "*" and not one["error"]]
        runs = list(trial_runs(sound, name)) if run else []
    problems += [f"{one.architecture} does not run: {one.error}" for one in runs if one.error]
    calls = {key: sum(one.calls.get(key, 0) for one in runs) for one in runs for key in one.calls}
    return {
        **environment(),
        "device": device.type,
        "dtype": name,
        "plugins": plugins,
        "ops": {
            op.name: [
                {
                    "provider": provider,
                    "priority": op.providers[provider].priority,
                    "reasons": list(reasons),
                    "calls": calls.get(f"{op.name}={provider}", 0) if run else None,
                }
                for provider, reasons in op.reasons(info).items()
            ]
            for op in OPS.values()
        },
        "runs": [asdict(one) for one in runs],
        "hubs": [] if is_offline() else [asdict(hub) for hub in reachability()],
        "problems": problems,
    }


def _plugins() -> tuple[list[dict[str, Any]], list[str]]:
    """Every entry of every group, with the error that loading it raises; then what is wrong, in lines."""
    from rapid_infer.cli.models import check_models
    from rapid_infer.errors import PluginError
    from rapid_infer.ops import load_providers
    from rapid_infer.registry import Entry, EntryPointTable, ModelRegistry

    findings = [finding for finding in check_models(ModelRegistry) if finding.kind != "note"]
    errors: dict[tuple[str | None, str], str] = {
        (finding.distribution, finding.architecture): finding.message for finding in findings if finding.architecture
    }
    problems = [f"{finding.kind}: {finding.message}" for finding in findings]

    def row(group: str, entry: Entry, error: str | None) -> dict[str, Any]:
        known = {"group": group, "name": entry.name, "target": entry.target, "distribution": entry.distribution}
        return {**known, "version": entry.version, "error": error}

    def loaded() -> Iterator[dict[str, Any]]:
        for entry in ModelRegistry.entries():
            clash = errors.get((None, entry.name))
            yield row("models", entry, errors.get((entry.distribution, entry.name)) or entry.fault or clash)
        for group in GROUPS:
            table = EntryPointTable(f"rapid_infer.{group}", what=group.replace("_", " "))
            for entry in table.entries():
                try:
                    table.load(entry)
                except PluginError as error:
                    problems.append(f"broken: {error}")
                    yield row(group, entry, str(error))
                else:
                    yield row(group, entry, None)

    # Stops at the first package of providers that is broken, which is found and reported one by one below.
    with contextlib.suppress(PluginError):
        load_providers()
    return list(loaded()), problems


def _print(report: dict[str, Any]) -> None:
    out = console()
    print_table(out, _facts(report))
    print_table(
        out,
        [(f["name"], f["path"], _state(f), f"{size_text(f['free_bytes'])} free on its disk") for f in report["caches"]],
        title="caches",
    )
    print_table(
        out,
        [
            (p["group"], p["name"], p["target"], f"{p['distribution'] or 'registered here'} {p['version'] or ''}",
             "broken, see below" if p["error"] else "ok")
            for p in report["plugins"]
        ],
        columns=["plugin", "name", "target", "distribution", ""],
    )  # fmt: skip
    print_table(out, _op_rows(report), columns=["op", "provider", "priority", "calls", "here"])
    for run in report["runs"]:
        if run["skipped"]:
            out.print(f"not run: {run['architecture']}: {run['skipped']}", markup=False)
    hubs: list[tuple[object, ...]] = [
        (hub["name"], hub["endpoint"], "answers" if hub["reachable"] else "DOES NOT ANSWER", hub["said"],
         f"{hub['seconds']:.2f} s")
        for hub in report["hubs"]
    ]  # fmt: skip
    print_table(out, hubs or [("not asked: offline",)], title="hubs")
    for problem in report["problems"]:
        out.print(problem, markup=False, soft_wrap=True)
    out.print(f"{len(report['problems'])} problems" if report["problems"] else "Nothing is broken.")


def _facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cpu, packages = report["cpu"], report["packages"]
    yield "rapid_infer", f"{report['rapid_infer']} on Python {report['python']} ({report['executable']})"
    yield "platform", report["platform"]
    yield "packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    yield "not installed", ", ".join(name for name, version in packages.items() if not version)
    fast = "with" if cpu["bfloat16"] else "without"
    yield (
        "cpu",
        f"{cpu['cores']} cores ({cpu['physical_cores']} physical), {cpu['threads']} threads, {fast} fast bfloat16, "
        f"{size_text(cpu['available_bytes'])} of memory available",
    )
    gpus = [
        f"{gpu['name']} (SM {gpu['capability']}, {size_text(gpu['free_bytes'])} of {size_text(gpu['bytes'])} free)"
        for gpu in report["gpus"]
    ]
    yield "gpus", ", ".join(gpus) or "none"
    yield "driver", f"{report['driver'] or 'none'}, torch built for CUDA {report['cuda'] or '(none)'}"
    yield "default", f"{report['device']} in {report['dtype']}"
    yield "variables", ", ".join(f"{name}={value}" for name, value in report["variables"].items()) or "none"


def _state(folder: dict[str, Any]) -> str:
    return ("" if folder["exists"] else "not there yet, ") + ("writable" if folder["writable"] else "NOT WRITABLE")


def _op_rows(report: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    for op, providers in report["ops"].items():
        chosen = next((p["provider"] for p in providers if not p["reasons"]), None)
        for row in providers:
            state = "; ".join(row["reasons"]) or ("chosen" if row["provider"] == chosen else "can run")
            yield op, row["provider"], row["priority"], "" if row["calls"] is None else row["calls"], state
