"""The packages that docs/operators/ shows, made from its text, registered, and put through the tests it shows."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rapid_infer.ops import OPS, load_providers
from rapid_infer.ops import registry as ops_registry

load_providers()

PAGES = Path(__file__).resolve().parents[2] / "docs" / "operators"
FILE = re.compile(r"```(?:python|toml)\n# (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The test module of a page; what pyproject.toml declares is as an installer would write it."""
    for name, text in FILE.findall((PAGES / f"{request.param}.md").read_text()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    name = project["name"].replace("-", "_")
    (tmp_path / "src" / name / "__init__.py").touch()
    folder = tmp_path / "src" / f"{name}-{project['version']}.dist-info"
    folder.mkdir()
    needs = "\n".join(f"Requires-Dist: {one}" for one in project["dependencies"])
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{needs}\n"
    (folder / "METADATA").write_text(head)
    ((group, entries),) = project["entry-points"].items()
    (folder / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in entries.items()))
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(ops_registry, "_loaded", set(ops_registry._loaded))
    before = {op: set(OPS[op].providers) for op in OPS}
    (file,) = (tmp_path / "tests").iterdir()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for op, names in before.items():
            for added in OPS[op].providers.keys() - names:
                del OPS[op].providers[added]
        for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
            del sys.modules[loaded]


def run(function: Any, *names: str) -> None:
    """Call a test function of a page with all arguments that its marks give."""
    values = {mark.args[0]: list(mark.args[1]) for mark in function.pytestmark}
    assert values.keys() == set(names)
    cases: list[dict[str, Any]] = [{}]
    for name in names:
        cases = [{**case, name: value} for case in cases for value in values[name]]
    assert len(cases) > 1
    for case in cases:
        function(**case)


@pytest.mark.parametrize("package", ["triton"], indirect=True)
def test_the_page_of_triton(package: Any) -> None:
    run(package.test_equals_the_reference, "dtype")
    assert "my_silu.kernel" in sys.modules


@pytest.mark.parametrize("package", ["external-library"], indirect=True)
def test_the_page_of_an_external_library(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = OPS["rms_norm"].reference
    norm = ModuleType("flashinfer.norm")
    calls: list[Any] = []

    # As flashinfer-python 0.6 has it.
    def rmsnorm(input: Any, weight: Any, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> Any:
        calls.append(input)
        return reference(input, weight, eps)

    norm.rmsnorm = rmsnorm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(norm=norm, __spec__=object()))
    monkeypatch.setitem(sys.modules, "flashinfer.norm", norm)
    run(package.test_equals_the_reference, "dtype")
    assert calls
    package.test_where_it_cannot_run()


@pytest.mark.parametrize("package", ["vendor"], indirect=True)
def test_the_page_of_a_vendor(package: Any) -> None:
    assert [op.name for op in package.OURS] == ["silu_and_mul", "linear"]
    run(package.test_equals_the_reference, "op", "dtype")
    package.test_both_are_chosen()
