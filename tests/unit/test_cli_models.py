"""The command line around the plugin table: listing, checking, exit codes, and what a listing imports."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rapid_infer.errors
from rapid_infer import cli, registry
from rapid_infer.cli import app
from rapid_infer.errors import ConfigError, EngineDeadError
from rapid_infer.registry import ModelTable
from rapid_infer.version import __version__

ROOT = Path(rapid_infer.errors.__file__).parents[1]
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "modelscope_hub", "triton")
GOOD = """
from torch import nn

from rapid_infer.plugin import WeightMap


class Model(nn.Module):
    weight_map = WeightMap([])

    @staticmethod
    def read_config(hf_config): ...

    def __init__(self, config, ctx): ...

    def forward(self, batch): ...
"""
Run = Callable[..., tuple[int, str, str]]


def install(
    site: Path, distribution: str, targets: dict[str, str], source: str | None = GOOD, requires: str = "torch"
) -> Path:
    """Write what `pip install` would leave in `site`; all targets are in the module fakeplug_<distribution>."""
    module = f"fakeplug_{distribution.replace('-', '_')}"
    folder = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.0\nRequires-Dist: {requires}\n")
    points = "".join(f"{name} = {module}:{attribute}\n" for name, attribute in targets.items())
    (folder / "entry_points.txt").write_text(f"[rapid_infer.models]\n{points}")
    if source is not None:
        (site / f"{module}.py").write_text(source)
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty site folder that is also all that the command sees."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(registry, "ModelRegistry", ModelTable([str(folder)]))
    yield folder
    for name in [name for name in sys.modules if name.startswith("fakeplug_")]:
        del sys.modules[name]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            app.run(list(args))
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


def test_the_table_and_the_json_list_what_is_installed(site: Path, run: Run) -> None:
    install(site, "plug-b", {"BForCausalLM": "Model"}, source="raise RuntimeError('imported')")
    install(site, "plug-a", {"AForCausalLM": "Model"})
    registry.ModelRegistry.register("CForCausalLM", "fakeplug_here:Model")

    code, out, _ = run("models")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["architecture", "target", "distribution", "version"],
        ["AForCausalLM", "fakeplug_plug_a:Model", "plug-a", "1.0"],
        ["BForCausalLM", "fakeplug_plug_b:Model", "plug-b", "1.0"],
        ["CForCausalLM", "fakeplug_here:Model", "registered", "here"],
    ]
    code, out, _ = run("models", "--json")
    report = json.loads(out)
    assert (code, report["version"], report["api_version"]) == (0, __version__, registry.API_VERSION)
    assert [model["source"] for model in report["models"]] == ["entry point", "entry point", "registered"]
    assert report["models"][0] == {
        "architecture": "AForCausalLM",
        "target": "fakeplug_plug_a:Model",
        "distribution": "plug-a",
        "version": "1.0",
        "source": "entry point",
    }


def test_a_long_target_is_not_cut_in_a_pipe(site: Path, run: Run) -> None:
    attribute = "Model" * 40
    install(site, "plug-a", {"AForCausalLM": attribute})
    assert f"fakeplug_plug_a:{attribute} " in run("models")[1]


def test_nothing_installed_is_no_error(site: Path, run: Run) -> None:
    code, out, _ = run("models", "--check")
    assert code == 0
    assert "pip install rapid-infer-llama" in out


def test_check_passes_when_all_is_well_and_keeps_prints_out_of_the_json(site: Path, run: Run) -> None:
    install(site, "plug-a", {"A": "Model"}, source=f"print('noise')\n{GOOD}", requires="rapid-infer>=0.0.1")
    code, out, err = run("models", "--check", "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["findings"]) == (0, True, [])
    assert report["models"][0]["status"] == "ok"
    assert "noise" in err
    assert run("models", "--check")[0] == 0


def test_check_shows_every_real_error(site: Path, run: Run) -> None:
    install(site, "plug-good", {"Good": "Model"})
    install(site, "plug-import", {"Import": "Model"}, source="import fakeplug_nosuch")
    install(site, "plug-syntax", {"Syntax": "Model"}, source="x = (")
    install(site, "plug-attr", {"Attr": "Missing"})
    install(site, "plug-empty", {"Empty": "Model"}, source="class Model: pass")
    install(site, "plug-old", {"Old": "Model"}, requires="rapid-infer<0.0.1")
    install(site, "plug-one", {"Clash": "Model"})
    install(site, "plug-two", {"Clash": "Model"})
    unreadable = install(site, "plug-bad", {"Bad": "Model"})
    (unreadable / "METADATA").write_bytes(b"\xff")

    code, out, _ = run("models", "--check", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (1, False)
    status = {(model["architecture"], model["distribution"]): model["status"] for model in report["models"]}
    assert status == {
        ("Good", "plug-good"): "ok",
        ("Import", "plug-import"): "broken",
        ("Syntax", "plug-syntax"): "broken",
        ("Attr", "plug-attr"): "broken",
        ("Empty", "plug-empty"): "broken",
        ("Old", "plug-old"): "broken",
        ("Clash", "plug-one"): "clash",
        ("Clash", "plug-two"): "clash",
        ("Bad", "plug-bad"): "broken",
    }
    expected = [
        ("broken", "ModuleNotFoundError: No module named 'fakeplug_nosuch'"),
        ("broken", "SyntaxError: '(' was never closed"),
        ("broken", "AttributeError: module 'fakeplug_plug_attr' has no attribute 'Missing'"),
        ("broken", "fakeplug_plug_empty:Model (plug-empty 1.0) breaks the plugin contract: it is no torch.nn.Module"),
        ("broken", "plug-old 1.0 requires rapid-infer<0.0.1"),
        ("clash", "`pip uninstall plug-one` or `pip uninstall plug-two`"),
        ("unreadable", "METADATA is unreadable"),
    ]
    assert len(report["findings"]) == len(expected)
    code, out, _ = run("models", "--check")
    assert code == 1
    for kind, text in expected:
        assert any(line.startswith(f"{kind}: ") and text in line for line in out.splitlines())
    assert "fakeplug_plug_old" not in sys.modules


def test_a_plain_listing_points_to_check_when_the_metadata_alone_is_wrong(site: Path, run: Run) -> None:
    install(site, "plug-one", {"Clash": "Model"})
    assert "--check" not in run("models")[1]
    registry.ModelRegistry.__dict__.pop("_scan")
    install(site, "plug-two", {"Clash": "Model"})
    code, out, _ = run("models")
    assert code == 0
    assert out.splitlines()[-1].endswith("rapid-infer models --check")


@pytest.mark.parametrize(("name", "kind", "expected"), [("A", "note", 0), ("B", "stale", 1)])
def test_metadata_found_twice_is_reported_with_both_paths(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, name: str, kind: str, expected: int
) -> None:
    used = install(site, "plug-a", {"A": "Model"})
    hidden = install(tmp_path / "other", "plug-a", {name: "Model"})
    monkeypatch.setattr(registry, "ModelRegistry", ModelTable([str(site), str(tmp_path / "other")]))
    code, out, _ = run("models", "--check", "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["kind"]) == (expected, kind)
    assert f"{used} is used and hides {hidden}" in finding["message"]


@pytest.mark.parametrize("layout", ["editable", "egg-info"])
def test_a_source_folder_that_has_moved_on_is_stale(site: Path, tmp_path: Path, run: Run, layout: str) -> None:
    folder = install(site, "plug-a", {"A": "Model", "B": "Model"})
    source = tmp_path / "my source"
    if layout == "editable":
        source.mkdir()
        link = {"url": source.as_uri(), "dir_info": {"editable": True}}
        (folder / "direct_url.json").write_text(json.dumps(link))
    else:
        source = site
        (folder / "METADATA").rename(folder / "PKG-INFO")
        folder.rename(site / "plug_a.egg-info")
    project = source / "pyproject.toml"
    header = '[project]\nname = "plug-a"\n[project.entry-points."rapid_infer.models"]\nA = "fakeplug_plug_a:Model"\n'

    project.write_text(f'{header}B = "fakeplug_plug_a:Model"\n')
    assert run("models", "--check")[0] == 0

    project.write_text(f'{header}C = "fakeplug_plug_a:Model"\n')
    code, out, _ = run("models", "--check", "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["kind"], finding["distribution"]) == (1, "stale", "plug-a")
    assert f"differ in B, C; reinstall it: `pip install -e {source}`" in finding["message"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("head_dim: got 0, expected more"), 2, "error: head_dim: got 0, expected more\n"),
        (EngineDeadError("rank 1 died first"), 1, "error: rank 1 died first\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, run: Run, error: BaseException, code: int, message: str
) -> None:
    def fail(table: object) -> None:
        raise error

    monkeypatch.setattr("rapid_infer.cli.models.check_models", fail)
    assert run("models", "--check") == (code, "", message)


def test_an_interrupt_while_modules_are_imported_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", interrupted)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(table: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("rapid_infer.cli.models.check_models", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        app.run(["models", "--check"])


def test_usage_errors_exit_with_2(run: Run) -> None:
    for args, what, where in [
        (["modelss"], "No such command 'modelss'. Did you mean 'models'?", ""),
        (["--nosuch"], "No such option: --nosuch", ""),
        (["models", "--nosuch"], "No such option: --nosuch", " models"),
        (["models", "extra"], "Got unexpected extra argument", " models"),
        (["generate", "--max-tokens", "many"], "Invalid value for '--max-tokens': ", " generate"),
        (["generate", "-p"], "Option '-p' requires an argument", " generate"),
        (["verify"], "Missing argument 'DIR'; ", " verify"),
    ]:
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {what}"), err
        assert err.endswith(f"; see `rapid-infer{where} --help`\n")
        assert err.count("\n") == 1
    code, out, err = run()
    assert (code, err) == (2, "")
    assert out == run("--help")[1]


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "download", "verify"])
@pytest.mark.parametrize("model", ["word", "FILE", "EMPTY", "NO_CONFIG"])
def test_a_model_that_is_none_is_one_line(run: Run, tmp_path: Path, command: str, model: str) -> None:
    (tmp_path / "FILE").touch()
    for name in ("EMPTY", "NO_CONFIG"):
        (tmp_path / name).mkdir()
    (tmp_path / "NO_CONFIG" / "notes.txt").touch()
    name = model if model == "word" else str(tmp_path / model)
    code, out, err = run(command, name, *(["-p", "Hi"] if command == "generate" else []))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert name in err
    assert err.count("\n") == 1


def test_doctor_refuses_what_is_no_dtype(run: Run) -> None:
    assert run("doctor", "--dtype", "int4")[::2] == (
        2,
        "error: dtype must be 'auto' or one of ['bfloat16', 'float16', 'float32'], got 'int4'\n",
    )


def test_help_has_a_line_for_every_command_and_an_example(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(any(f" {name} " in line for line in out.splitlines()) for name in app.COMMANDS)
    assert "Example: rapid-infer generate" in out
    assert "Exit codes: 0 done, 2 something to correct" in out
    assert "completion" not in out
    assert run("models", "--help")[0] == 0
    for command in ([], ["models"], ["generate"]):
        assert run(*command, "-h") == run(*command, "--help")


def test_only_the_called_command_is_imported(monkeypatch: pytest.MonkeyPatch, site: Path, run: Run) -> None:
    monkeypatch.setitem(app.COMMANDS, "other", "fakeplug_other:command")
    (site / "fakeplug_other.py").write_text('def command() -> None:\n    """Do something else."""\n    print("done")\n')
    assert run("models")[0] == 0
    assert "fakeplug_other" not in sys.modules
    assert "Do something else." in run("--help")[1]
    assert run("other")[:2] == (0, "done\n")


def test_version_is_printed_on_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    monkeypatch.setattr(sys, "argv", ["rapid-infer", "--version"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr().out == f"rapid-infer {__version__}\n"
    assert run("--version")[:2] == (0, f"rapid-infer {__version__}\n")


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """50 plugins whose modules leave a mark when they are imported, and heavy packages that do the same."""
    source = f"import pathlib\npathlib.Path({str(tmp_path)!r}, 'imported').open('a').write(f'{{__name__}} ')\n"
    for number in range(50):
        install(tmp_path, f"plug-{number}", {f"Fake{number}ForCausalLM": "Model"}, source=source)
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text(source)
    return tmp_path


def process(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-m", "rapid_infer.cli", *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("args", [["--version"], ["models"], ["models", "--json"]])
def test_a_listing_imports_nothing_heavy_and_no_plugin(many: Path, args: list[str]) -> None:
    done = process(many, *args)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (many / "imported").exists(), (many / "imported").read_text()
    if args == ["models", "--json"]:
        listed = {model["architecture"] for model in json.loads(done.stdout)["models"]}
        assert {f"Fake{number}ForCausalLM" for number in range(50)} <= listed


def test_exit_codes_reach_the_shell(many: Path) -> None:
    assert process(many, "models", "--nosuch").returncode == 2
    (many / "rich.py").write_text("raise ZeroDivisionError('ours')")
    done = process(many, "models")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: ours" in done.stderr
