"""From nothing to a plugin: the commands of the page, what the scaffold writes, and a third party's wheel."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from rapid_infer import ModelRegistry
from rapid_infer.cli import scaffold
from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.registry import Entry
from rapid_infer.testing.conformance import CHECKS, Case, cases_of, conformance_tests, entries_of, plan, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding-a-model.md"


def call(arguments: list[str], **options: object) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Variables of an environment of its own, which sees what is installed here and installs without a network."""
    call([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])  # type: ignore[list-item]
    programs = tmp_path / "venv" / "bin"
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    offline = "install --quiet --no-index --no-build-isolation"
    scripts = {
        "pip": f'shift; exec python -m pip {offline} "$@"',
        "rapid-infer": 'exec python -m rapid_infer "$@"',
    }
    for name, script in scripts.items():
        file = programs / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    plugins = [str(folder) for folder in sorted(ROOT.glob("plugins/*/src"))]
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": ":".join([str(ROOT), *plugins])}


def test_the_commands_of_the_page_lead_to_a_plugin_that_passes(shell: dict[str, str], tmp_path: Path) -> None:
    found = re.search(r"<!-- executed: tests/plugins/test_plugin_kit.py -->\s+```sh\n(.*?)```", PAGE.read_text(), re.S)
    assert found
    commands = found[1].splitlines()
    assert len(commands) < 10
    folder = tmp_path / "empty"
    folder.mkdir()
    said = [call(shlex.split(command), cwd=folder, env=shell) for command in commands]
    assert "MyModelForCausalLM" in said[2]
    assert re.search(r"^(\d+) of \1 checks passed$", said[3], re.M)


@pytest.mark.parametrize("like", scaffold.LIKE)
def test_what_is_written_is_short_and_tidy(like: str, tmp_path: Path) -> None:
    folder = scaffold.write("tiny2", like, parent=tmp_path)
    assert folder.name == "rapid-infer-tiny2"
    lines = [line for file in folder.rglob("*.*") if file.is_file() for line in file.read_text().splitlines() if line]
    assert len(lines) < 100
    assert not any("$" in line for line in lines)
    for arguments in (["format", "--check"], ["check"]):
        call([sys.executable, "-m", "ruff", *arguments, "--config", str(ROOT / "pyproject.toml"), str(folder)])


def test_a_plugin_like_llama_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = scaffold.write("tiny3", "llama", architecture="OtherForCausalLM", parent=tmp_path)
    monkeypatch.syspath_prepend(folder / "src")
    target = "rapid_infer_tiny3.model:OtherForCausalLM"
    monkeypatch.setitem(
        ModelRegistry._registered, "OtherForCausalLM", Entry("OtherForCausalLM", target, None, None, "registered")
    )
    steps = plan(cases_of([ModelRegistry.lookup("OtherForCausalLM")]))
    for subject, check in steps:
        if check.__name__ in ("config", "weight_map", "docs", "logits"):
            run(subject, check)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("Bad Name",), "plugin name 'Bad Name': expected lower-case"),
        (("fine", "gpt9"), "like='gpt9': expected one of llama, qwen3"),
        (("fine", "llama", "not a class"), "architecture 'not a class': expected a class name"),
        (("llama",), "'LlamaForCausalLM' is already served by rapid-infer-llama"),
        (("taken",), "exists already"),
    ],
)
def test_what_cannot_be_begun_is_refused(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "rapid-infer-taken").mkdir()
    with pytest.raises(ConfigError, match=said):
        scaffold.write(*arguments, parent=tmp_path)


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(PluginError, match=r"no-such-plugin is not installed, or declares no .*rapid-infer-llama"):
        conformance_tests("no-such-plugin")
    with pytest.raises(PluginError, match=r"cannot read CASES\['X'\] of json\.conformance"):
        cases_of([Entry("X", "json.decoder:JSONDecoder", None, None, "registered")])
    with pytest.raises(PluginError, match="expected a dict with keys of model_type, sizes"):
        Case.read({"modeltype": "llama"}, "here")
    with pytest.raises(PluginError, match="here has no model_type"):
        Case.read({}, "here")


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The example, built as a wheel and installed in a folder of its own."""
    work = tmp_path_factory.mktemp("gemma2")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    source = work / "source"
    call(["cp", "-r", str(ROOT / "examples" / "plugin-gemma2"), str(source)])
    offline = ["--no-deps", "--no-index"]
    call([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(work), str(source)])
    (wheel,) = work.glob("*.whl")
    call([*pip, "install", *offline, "--target", str(work / "installed"), str(wheel)])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(work / "installed")
        ModelRegistry.__dict__.pop("_scan", None)
        yield "rapid-infer-gemma2"
    ModelRegistry.__dict__.pop("_scan", None)


@pytest.fixture(scope="module")
def steps(gemma2: str) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for subject, check in plan(cases_of(entries_of(gemma2))):
        found.setdefault(check.__name__, []).append((subject, check))
    return found


def test_three_lines_of_a_test_file_are_all_checks(gemma2: str, steps: dict[str, list[object]]) -> None:
    file = ROOT / "examples" / "plugin-gemma2" / "tests" / "test_conformance.py"
    assert len(file.read_text().splitlines()) == 3
    (mark,) = runpy.run_path(str(file))["test_conformance"].pytestmark
    assert len(mark.args[1]) == sum(map(len, steps.values()))
    assert "Gemma2ForCausalLM-no-caps-logits" in mark.kwargs["ids"]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_a_third_party_s_wheel_conforms(check: str, steps: dict[str, list[tuple[object, object]]]) -> None:
    for subject, one in steps[check]:
        assert "installed" in str(sys.modules[subject.cls.__module__].__file__)  # type: ignore[attr-defined]
        run(subject, one)  # type: ignore[arg-type]
