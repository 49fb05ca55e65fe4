"""`rapid-infer doctor`: what is broken and where, what ran, and which hubs answer."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_model import Hubs
from tiny_chat import Run, make_run

from rapid_infer import ModelRegistry
from rapid_infer.cli import environment
from rapid_infer.hub.choose import Endpoints
from rapid_infer.hub.reachability import reachability

BROKEN = "x = 1\nraise RuntimeError('no such driver')\n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    ModelRegistry.__dict__.pop("_scan", None)
    yield tmp_path
    ModelRegistry.__dict__.pop("_scan", None)
    for name in [name for name in sys.modules if name.startswith("fakedoctor_")]:
        del sys.modules[name]


def install(site: Path, group: str, name: str, source: str) -> Path:
    module = f"fakedoctor_{group}"
    folder = site / f"fake_{group}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: fake-{group}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[rapid_infer.{group}]\n{name} = {module}:Thing\n")
    file = site / f"{module}.py"
    file.write_text(source)
    return file


def test_everything_that_is_installed_runs_and_is_counted(hubs: Hubs, run: Run) -> None:
    code, out, _ = run("doctor", "--dtype", "float32", "--json")
    report = json.loads(out)
    assert (code, report["problems"]) == (0, [])
    assert {run["architecture"] for run in report["runs"] if run["calls"]} == set(ModelRegistry.architectures())
    for op, providers in report["ops"].items():
        ran = [row["provider"] for row in providers if row["calls"]]
        assert all(not row["reasons"] for row in providers if row["provider"] in ran), op
    # What every model does, and what one with experts and one with latents does; the rest only with other options.
    counted = {op for op, providers in report["ops"].items() if any(row["calls"] for row in providers)}
    assert {"paged_attention", "rms_norm", "gumbel_argmax", "fused_experts", "mla_decode", "commit_tokens"} <= counted
    assert [(hub["reachable"], hub["endpoint"]) for hub in report["hubs"]] == [(True, hubs.hf.url), (True, hubs.ms.url)]
    assert report["caches"][0]["free_bytes"] > 0
    assert "HF_ENDPOINT" in report["variables"]


def test_a_broken_plugin_of_any_group_shows_its_exception_and_the_line(
    site: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # and back, after the option
    model = install(site, "models", "OddForCausalLM", BROKEN)
    providers = install(site, "ops", "odd", "import fakedoctor_absent\n")
    code, out, _ = run("doctor", "--offline", "--no-run")
    assert code == 1
    assert f"cannot load fakedoctor_models:Thing (fake-models 1.0): RuntimeError: no such driver (at {model}:2)" in out
    assert f"ModuleNotFoundError: No module named 'fakedoctor_absent' (at {providers}:1)" in out
    assert out.endswith("2 problems\n")
    assert "paged_attention" in out, "the operators are shown all the same"
    assert "not asked: offline" in out


def test_a_hub_that_does_not_answer_is_told_soon() -> None:
    with socket.socket() as silent, socket.socket() as free:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        free.bind(("127.0.0.1", 0))
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in (free, silent)]
        free.close()
        refused, late = reachability(Endpoints(*urls), seconds=0.3)
    assert (refused.reachable, refused.endpoint, refused.said) == (False, urls[0], "no connection (ConnectionError)")
    assert not late.reachable
    assert "no answer" in late.said
    assert late.seconds < 2


def test_secrets_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_hidden")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hidden@proxy")
    found = environment.environment()
    assert "hidden" not in json.dumps(found)
    assert found["variables"]["HF_TOKEN"] == "(set)"


def test_the_driver_s_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    monkeypatch.setattr(environment, "DRIVER", file)
    assert environment.environment()["driver"] == "550.54.15"
