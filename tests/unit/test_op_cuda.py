"""The example of an operator in CUDA C++, where it cannot run: what its own tests on a GPU do not see."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer.cli.doctor import diagnose
from rapid_infer.ops import OPS, OpInfo
from rapid_infer.ops import registry as ops_registry

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "op-cuda"
OP = OPS["fused_add_rms_norm"]
HOPPER = OpInfo("cuda", torch.bfloat16, (9, 0))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What its wheel holds, in a folder on the path; kernels have another of their own."""
    work = tmp_path_factory.mktemp("op_cuda")
    shutil.copytree(SOURCE, work / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*pip, "--wheel-dir", work, work / "source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(work / "installed"))
        patch.setenv("TORCH_EXTENSIONS_DIR", str(work / "kernels"))
        patch.setattr(ops_registry, "_loaded", set(ops_registry._loaded))
        yield work
    OP.providers.pop("cuda_cpp", None)


@pytest.fixture
def report(installed: Path) -> dict[str, Any]:
    return diagnose("bfloat16")


@pytest.fixture
def build(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that compiles, in a torch that is built with CUDA."""
    module = import_module("rapid_infer_op_cuda.build")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for cached in (module.library, module.cannot_build, module.load):
        cached.cache_clear()
    yield module
    for cached in (module.library, module.cannot_build, module.load):
        cached.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_doctor_says_why_it_is_not_chosen_and_nothing_is_built(installed: Path, report: dict[str, Any]) -> None:
    first, *others = report["ops"]["fused_add_rms_norm"]
    assert first == {
        "provider": "cuda_cpp",
        "priority": 20,
        "reasons": ["runs on cuda, not cpu"],
        "calls": first["calls"],
    }
    assert not first["calls"]
    assert OP.bind(OpInfo.of("cpu", torch.bfloat16)).provider == others[0]["provider"] == "cpu"
    assert not (installed / "kernels").exists()
    assert "rapid_infer_op_cuda.norm" not in sys.modules


def test_it_is_chosen_where_it_can_run_and_says_what_is_missing_else(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = OP.providers["cuda_cpp"]
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provider.reasons(HOPPER) == [
        "nvcc is not found: install the CUDA toolkit, or set CUDA_HOME to where it is",
        "ninja is not found: install it",
        "c++ is not found: install it",
    ]
    assert OP.bind(HOPPER).provider != "cuda_cpp"
    for tool in ("bin/nvcc", "ninja", "c++"):
        (tmp_path / tool).parent.mkdir(exist_ok=True)
        (tmp_path / tool).touch(0o755)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    build.cannot_build.cache_clear()
    assert OP.bind(HOPPER).provider == "cuda_cpp"
    assert provider.reasons(OpInfo("cuda", torch.float64, (8, 0))) == [
        "takes bfloat16, float16 and float32, not float64",
        "is compiled for SM 90 and newer, this GPU is SM 80",
    ]
    monkeypatch.setattr(torch.version, "cuda", None)
    build.cannot_build.cache_clear()
    assert provider.reasons(HOPPER) == [f"torch {torch.__version__} is built without CUDA"]


def test_it_is_compiled_once_and_found_by_other_processes(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []
    loaded: list[str] = []

    def compile_and_load(**given: Any) -> None:
        compiled.append(given)
        if len(compiled) == 1:
            raise RuntimeError("error: expected a ';'")
        Path(given["build_directory"], f"{given['name']}.so").touch()

    monkeypatch.setattr("torch.utils.cpp_extension.load", compile_and_load)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    with pytest.raises(RuntimeError, match="expected a ';'"):
        build.load()
    assert list(build.library().parent.iterdir()) == []
    build.load()
    assert list(build.library().parent.iterdir()) == [build.library()]
    assert [Path(source).name for source in compiled[1]["sources"]] == ["norm.cu", "binding.cpp"]
    assert all(Path(source).exists() for source in compiled[1]["sources"])
    build.load.cache_clear()
    build.load()
    assert (len(compiled), loaded) == (2, [str(build.library())])
    # With a library, no compiler is needed.
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    assert build.cannot_build() == ()
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    before = build.library()
    build.library.cache_clear()
    assert build.library() != before


def test_the_list_of_a_model_s_kernels_is_made_without_it(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.load", None)
    x = torch.empty(3, 64, dtype=torch.bfloat16, device="meta")
    out, residual = OP.providers["cuda_cpp"].fn(x, x.clone(), x[0], 1e-6)
    assert out.shape == residual.shape == x.shape


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_kernel_compiles_for_sm_90_and_as_ptx(build: Any, tmp_path: Path) -> None:
    command = ["nvcc", "-c", str(build.SOURCES[1]), "-o", str(tmp_path / "norm.o"), "-std=c++20", *build.FLAGS]
    done = subprocess.run([*command, "-Xptxas=-v"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Three dtypes, by packs and one value at a time.
    assert done.stderr.count("for 'sm_90'") == 6
    assert done.stderr.count("0 bytes spill stores, 0 bytes spill loads") == 6
