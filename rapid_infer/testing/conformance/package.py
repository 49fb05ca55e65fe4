"""Checks that need no weights: how the config is read, the remap table, what the package imports, its README."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from rapid_infer.errors import ConfigError
from rapid_infer.loader.computed import why_computed
from rapid_infer.loader.inventory import Inventory
from rapid_infer.loader.rules import Ignored
from rapid_infer.loader.weight_map import TIED
from rapid_infer.testing.conformance.subject import Subject, expect
from rapid_infer.testing.weight_map_lint import lint_weight_map
from rapid_infer.worker.contract import check_class, read_config

WRONG: Mapping[type, Any] = {int: "three", float: "small", bool: "perhaps", str: "no_such_value"}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
IMPORT_SECONDS = 0.3
"""Of processor time, with the facade imported already."""


class Replaced:
    """A transformers config that has other values for some fields, and notes which fields are read."""

    def __init__(self, config: Any, values: Mapping[str, Any]) -> None:
        self._config, self._values = config.get_text_config(), values
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = self._values[name] if name in self._values else getattr(self._config, name)
        return self.read.setdefault(name, value)

    def get_text_config(self) -> Replaced:
        return self


def config(subject: Subject) -> None:
    """The config is a frozen dataclass; a field that is missing, of another type or zero is refused by its name."""
    check_class(subject.cls, subject.entry)
    found = read_config(subject.cls, subject.checkpoint)
    frozen: Any = getattr(found, "__dataclass_params__", None)
    expect(
        frozen is not None and frozen.frozen,
        f"read_config returns a {type(found).__name__}: expected a frozen dataclass",
    )
    watched = Replaced(subject.checkpoint.hf_config, {})
    subject.cls.read_config(watched)
    faults: list[str] = []
    for name, value in watched.read.items():
        if type(value) in WRONG:
            faults += _refusal(subject, {name: WRONG[type(value)]}, must=True)
            faults += _refusal(subject, {name: None}, must=False)
        if name in SIZES:
            faults += _refusal(subject, {name: 0}, must=True)
    for values in subject.case.refuses:
        faults += _refusal(subject, values, must=True)
    expect(not faults, "; ".join(faults))


def _refusal(subject: Subject, values: Mapping[str, Any], must: bool) -> Iterator[str]:
    """Unless `read_config` refuses these values by a name of theirs, or takes them where it need not."""
    said = ", ".join(f"{name}={value!r}" for name, value in values.items())
    try:
        subject.cls.read_config(Replaced(subject.checkpoint.hf_config, values))
    except ConfigError as error:
        words = str(error).replace("_", " ")
        if must and not any(
            name.replace("_", " ") in words or repr(value) in str(error) for name, value in values.items()
        ):
            yield f"config.json with {said} is refused by {str(error)!r}, which does not name the field"
    except Exception as error:
        yield f"config.json with {said} raises {type(error).__name__}: {error}; expected a ConfigError (ConfigReader)"
    else:
        if must:
            yield f"config.json with {said} is taken without an error; expected a ConfigError that names the field"


def weight_map(subject: Subject) -> None:
    """Every tensor of the checkpoint fills the model once; no rule repeats, hides or undoes another."""
    model, plan = (rank := subject.rank(load=False)).model, rank.plan
    table = model.weight_map
    faults = lint_weight_map(table)
    expect(not faults, "the remap table has faults: " + "; ".join(faults))
    assert plan is not None
    plan.check()
    tensors = Inventory.scan(subject.path).tensors
    lost = {name: why for name, why in plan.ignored.items() if why != TIED.why and why_computed(tensors[name]) is None}
    expect(not lost, f"the remap table ignores tensors that the oracle's own model has: {lost}")
    for name in tensors:
        targets = table.resolve(name)
        if isinstance(targets, Ignored):
            continue
        for target in targets:
            again = table.resolve(target.name)
            names = set() if isinstance(again, Ignored) else {one.name for one in again}
            expect(
                names == {target.name} or names <= {one.name for one in targets} != set(),
                f"the remap table is not idempotent: {name} becomes {target.name}, and that {sorted(names) or None}",
            )


def imports(subject: Subject) -> None:
    """The package imports the standard library, torch, itself and `rapid_infer.plugin`, and that quickly."""
    package = subject.entry.target.partition(":")[0].partition(".")[0]
    folder = Path(str(importlib.import_module(package).__file__)).parent
    faults = [fault for file in sorted(folder.rglob("*.py")) for fault in _foreign_imports(file, package)]
    expect(not faults, "; ".join(faults))
    seconds = _import_seconds(package, subject.entry.target.partition(":")[0])
    expect(
        seconds < IMPORT_SECONDS,
        f"importing {package} takes {seconds:.2f} s of processor time, the budget is {IMPORT_SECONDS} s: "
        "compute nothing when a module is imported",
    )


def _foreign_imports(file: Path, package: str) -> Iterator[str]:
    """At the top level a config class may need transformers; what is heavy belongs in functions."""
    allowed = {"torch", "transformers", package, *sys.stdlib_module_names}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            top, where = name.partition(".")[0], f"{file.name}:{node.lineno} imports {name}"
            if top == "rapid_infer" and name != "rapid_infer.plugin":
                yield f"{where}: a plugin imports rapid_infer.plugin alone"
            elif top not in {*allowed, "rapid_infer"} and node in tree.body:
                yield f"{where} at the top: import it inside the function that needs it"


def _import_seconds(package: str, module: str) -> float:
    """Measured in a child, which forgets the package and imports it again."""
    if not hasattr(os, "fork"):
        return 0.0
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]
            start = time.process_time()
            importlib.import_module(module)
            os.write(write, str(time.process_time() - start).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    expect(bool(text), f"importing {module} a second time fails")
    return float(text)


def docs(subject: Subject) -> None:
    """The package's README shows the remap table as it is."""
    rows = [" ".join(row.split()) for row in str(subject.cls.weight_map).splitlines()]
    where, text = _readme(subject)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    shown = any(lines[start : start + len(rows)] == rows for start in range(len(lines)))
    expect(
        shown,
        f"{where} does not show the remap table of {subject.entry.name} as it is now; put this there:\n```\n"
        f"{subject.cls.weight_map}\n```",
    )


def _readme(subject: Subject) -> tuple[str, str]:
    """README.md beside the pyproject.toml above the package, or what was installed of it."""
    package = subject.entry.target.partition(":")[0].partition(".")[0]
    file = Path(str(importlib.import_module(package).__file__))
    for folder in file.parents[1:4]:
        if (folder / "pyproject.toml").is_file():
            readme = folder / "README.md"
            return str(readme), readme.read_text(encoding="utf-8") if readme.is_file() else ""
    installed: Any = metadata(subject.entry.distribution) if subject.entry.distribution else {}
    text = "" if not installed else installed.get("Description") or installed.get_payload()
    return "the package's description (readme in pyproject.toml)", str(text)
