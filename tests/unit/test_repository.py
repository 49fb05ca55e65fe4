"""Promises that hold for the whole repository: cheap imports, small plugins behind the facade, true documents."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rapid_infer import hub
from rapid_infer.errors import HubError

ROOT = Path(__file__).resolve().parents[2]
PLUGIN_FILES = sorted(ROOT.glob("plugins/*/src/**/*.py"))
OUTSIDE_FILES = [*PLUGIN_FILES, *sorted(ROOT.glob("examples/*/src/**/*.py"))]
FACADES = {
    "rapid_infer.models": "rapid_infer.plugin",
    "rapid_infer.ops": "rapid_infer.ops",
    "rapid_infer.quantization": "rapid_infer.quant",
}
"""What a package that declares an entry-point group may import of the runtime."""
LIBRARIES = ("flash_attn", "flashinfer", "vllm")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    # Triton's interpreter changes priorities, which stand in the documents.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=env)


WITH_TORCH = {"worker", "executors", "layers", "loader", "ops", "parallel", "plugin", "quant", "testing"}
WITHOUT_TORCH = {"cache", "compiler", "process"}
"""What the host side uses of what compiles kernels."""


def test_importing_the_host_side_loads_nothing_heavy() -> None:
    """Every module but the device side's, a new one too; the import contract alone does not see what is lazy."""
    package = ROOT / "rapid_infer"
    parts = [file.relative_to(package).with_suffix("").parts for file in sorted(package.rglob("*.py"))]
    names = [
        ".".join(("rapid_infer", *part)).removesuffix(".__init__")
        for part in parts
        if part[0] not in WITH_TORCH or (part[1:2] == ("precompile",) and part[-1] in WITHOUT_TORCH)
    ]
    known = ("llm", "text.tokenizer", "ipc.launch", "ops.precompile.compiler")
    assert {f"rapid_infer.{name}" for name in known} <= set(names)
    heavy = "[m for m in sys.modules if m.startswith(('rapid_infer_', 'torch', 'transformers'))]"
    check = f"for name in {names}:\n    importlib.import_module(name)\n    assert not {heavy}, name"
    done = run("-c", f"import importlib, sys\n{check}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", OUTSIDE_FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_plugins_import_the_facade_torch_and_the_standard_library(file: Path) -> None:
    folder, project, _, package, *_ = file.relative_to(ROOT).parts
    groups = tomllib.loads((ROOT / folder / project / "pyproject.toml").read_text())["project"]["entry-points"]
    libraries = LIBRARIES if package == "rapid_infer_ops_attention" else ()
    allowed = {"torch", package, *libraries, *map(FACADES.__getitem__, groups), *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            assert name in allowed or name.partition(".")[0] in allowed - {"rapid_infer"}, f"line {node.lineno}: {name}"


def test_every_folder_of_modules_is_a_package() -> None:
    """What is not would be missing where the runtime is installed: setuptools looks for packages."""
    for file in [*(ROOT / "rapid_infer").rglob("*.py"), *OUTSIDE_FILES]:
        assert (file.parent / "__init__.py").exists(), file


def test_dense_models_stay_small() -> None:
    for file in (ROOT / "plugins").glob("*/src/*/model.py"):
        assert len(file.read_text().splitlines()) < 200, file


@pytest.mark.parametrize("package", ["engine", "worker", "loader", "cache", "ipc", "frontend", "executors"])
def test_the_runtime_knows_no_model_and_no_kind_of_attention(package: str) -> None:
    for file in (ROOT / "rapid_infer" / package).glob("*.py"):
        # A cache specification says what an attention layer stores, and is named after it.
        text = file.read_text().replace("MLAKV", "") if file.parts[-2:] == ("cache", "spec.py") else file.read_text()
        assert not re.search(r"deepseek|qwen|llama|mla", text, re.IGNORECASE), file


def test_any_test_files_can_be_run_together() -> None:
    """Folders of tests are on one path: a name must be one file, and `conftest` is never the same one."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py"]
    assert len({file.name for file in files}) == len(files)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.module != "conftest", file


@pytest.mark.parametrize("script", ["make_docs.py", "make_figures.py"])
def test_generated_documents_are_up_to_date(script: str) -> None:
    done = run(f"scripts/{script}", "--check")
    assert done.returncode == 0, done.stderr


def test_the_python_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        hub.resolve("demo")
    except HubError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    exec(example[1], {})
    assert "The capital of France is ->  Paris." in capsys.readouterr().out
