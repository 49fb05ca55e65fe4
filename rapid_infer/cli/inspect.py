"""`rapid-infer inspect`: what a model directory is, who serves it, and whether its weights fit; reads headers only."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import typer

from rapid_infer.cli import options
from rapid_infer.cli.tables import console, print_table
from rapid_infer.errors import WeightError


@dataclass(frozen=True)
class Inspection:
    """Everything `inspect` prints. Bytes are those of one rank; `kv_bytes_per_token` over all layers."""

    path: str
    architecture: str
    plugin: str
    target: str
    dtype: str
    config: dict[str, Any]
    parameters: int
    parameter_bytes: int
    kv_bytes_per_token: int
    kv_bytes_max_model_len: int
    max_model_len: int
    caches: list[str]
    checkpoint_tensors: int
    checkpoint_bytes: int
    remap: list[dict[str, str]]
    tensors: list[dict[str, Any]]
    ignored: dict[str, str]
    untied: list[str]
    problems: str | None


@options.expand(engine_args=("dtype", "max_model_len", "model_plugin", "model_impl", "hub", "revision"))
def inspect(
    *,
    model: options.Model = "demo",
    as_json: options.AsJson = False,
    engine_args: dict[str, Any],
    offline: options.Offline = False,
) -> None:
    """Show config, plugin, remap table, and parameter and KV bytes of a model. Example: rapid-infer inspect demo

    Builds the model without memory and reads only the headers of the weight files. Exit code 2 when they do not fill
    it.
    """
    options.go_offline(offline)
    found = examine(model, **engine_args)
    if as_json:
        print(json.dumps(asdict(found), indent=2, default=str))
    else:
        _print(found)
    if found.problems:
        raise typer.Exit(2)


def examine(model: str, **kwargs: Any) -> Inspection:
    """Build `model` on the meta device and plan its loading. Keyword arguments as for `LLM`."""
    from rapid_infer.config import EngineArgs
    from rapid_infer.loader.inventory import Inventory
    from rapid_infer.loader.plan import plan_load
    from rapid_infer.startup import configure, locate
    from rapid_infer.worker.build import build_model, cache_demand, cache_groups

    args = EngineArgs.from_kwargs(**kwargs)
    checkpoint, entry = locate(model, args)
    found = configure(checkpoint, entry, args)
    config = found.config
    # No table of positions is needed to look at shapes.
    short = replace(config, model=replace(config.model, max_model_len=1))
    built = build_model(found.cls, checkpoint, short, "meta", found.model_config)
    groups = cache_groups(built.model)
    per_token = sum(group.bytes_per_token() for group in groups)
    demand, length = cache_demand(config, groups), config.model.max_model_len
    tensors: list[dict[str, Any]] = []
    ignored: dict[str, str] = {}
    untied: list[str] = []
    problems, count, nbytes = None, 0, 0
    try:
        inventory = Inventory.scan(checkpoint.path)
        count, nbytes = len(inventory.tensors), inventory.total_bytes
        plan = plan_load(built.model, built.model.weight_map, inventory)
        tensors, ignored, untied = _tensor_rows(built.model, plan), plan.ignored, list(plan.untied)
        plan.check()
    except WeightError as error:
        problems = str(error)
    # After the plan, which gives a head that only seemed to be tied a parameter of its own.
    params = list(built.model.parameters())
    return Inspection(
        path=str(checkpoint.path),
        architecture=checkpoint.architecture,
        plugin=entry.origin,
        target=entry.target,
        dtype=config.model.dtype,
        config=asdict(built.config),
        parameters=sum(p.numel() for p in params),
        parameter_bytes=sum(p.nbytes for p in params),
        kv_bytes_per_token=per_token,
        kv_bytes_max_model_len=demand.bytes(length, 1) - demand.bytes(length, 0),
        max_model_len=length,
        caches=[f"{group.layers} x {group.spec}" for group in groups],
        checkpoint_tensors=count,
        checkpoint_bytes=nbytes,
        remap=[dict(row._asdict()) for row in built.model.weight_map.rows()],
        tensors=tensors,
        ignored=ignored,
        untied=untied,
        problems=problems,
    )


def _tensor_rows(model: Any, plan: Any) -> list[dict[str, Any]]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        {
            "checkpoint": copy.info.name,
            "shape": list(copy.info.shape),
            "dtype": str(copy.info.dtype).removeprefix("torch."),
            "parameter": names[id(copy.placement.param)],
            "rows": _rows(copy.placement),
        }
        for copy in plan.copies
    ]


def _rows(placement: Any) -> list[int] | None:
    """Which rows of the parameter a tensor fills; None for all."""
    first = placement.target[0] if placement.target else slice(None)
    if not isinstance(first, slice) or first.start is None or first == slice(0, placement.param.shape[0]):
        return None
    return [first.start, first.stop]


def _grouped(tensors: list[dict[str, Any]]) -> list[list[str]]:
    """One line for all layers: numbers in names become `*`."""
    groups: dict[tuple[str, ...], int] = {}
    for row in tensors:
        names = [re.sub(r"(?<=\.)\d+(?=\.)", "*", row[key]) for key in ("checkpoint", "parameter")]
        where = "[{}:{}]".format(*row["rows"]) if row["rows"] else ""
        key = (names[0], " x ".join(map(str, row["shape"])), row["dtype"], names[1] + where)
        groups[key] = groups.get(key, 0) + 1
    return [[str(count), *key] for key, count in groups.items()]


def _print(found: Inspection) -> None:
    from rich.console import Console

    from rapid_infer.loader.problems import group_names

    out, gib = console(), 1024**3
    facts: list[tuple[str, object]] = [
        ("architecture", found.architecture),
        ("plugin", f"{found.plugin} ({found.target})"),
        ("dtype", found.dtype),
        ("parameters", f"{found.parameters:,} = {found.parameter_bytes / gib:.3f} GiB"),
        ("KV cache", f"{found.kv_bytes_per_token:,} bytes/token; {', '.join(found.caches)}"),
        ("  one full sequence", f"{found.max_model_len:,} tokens = {found.kv_bytes_max_model_len / gib:.3f} GiB"),
        ("checkpoint", f"{found.checkpoint_tensors} tensors = {found.checkpoint_bytes / gib:.3f} GiB"),
    ]
    print_table(out, facts, title=found.path)
    print_table(out, found.config.items(), title="config, as the plugin reads it")
    rules = [list(row.values()) for row in found.remap]
    print_table(out, rules, columns=["rule", "checkpoint", "model", "note"], title="remap rules")
    columns = ["tensors", "checkpoint", "shape", "dtype", "parameter"]
    print_table(out, _grouped(found.tensors), columns=columns, title="remap table")
    for why in dict.fromkeys(found.ignored.values()):
        for names in group_names(name for name, reason in found.ignored.items() if reason == why):
            out.print(f"ignored: {names}: {why}", markup=False)
    for name in found.untied:
        out.print(f"untied: {name}: differs from what the config ties it to, and is used for its own", markup=False)
    if found.problems:
        Console(stderr=True).print(f"error: {found.problems}", markup=False, highlight=False, soft_wrap=True)
    else:
        out.print("The checkpoint fills the model exactly.")
