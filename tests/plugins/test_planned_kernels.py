"""The kernels of a model, found and compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from rapid_infer.config import CheckpointInfo, DeviceInfo, EngineArgs
from rapid_infer.device import GpuInfo
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.ops.precompile import compiler
from rapid_infer.ops.precompile.cache import VARIABLE
from rapid_infer.ops.precompile.compiler import KernelCompiler, Show
from rapid_infer.registry import ModelRegistry
from rapid_infer.startup import DRY_RUN

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
H200 = GpuInfo("NVIDIA H200", (9, 0), 132)


def test_one_layer_of_each_kind_launches_all_kernels(qwen3, mla) -> None:
    script = Path(__file__).parent / "planned_kernels.py"
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    paths = [str(model.path) for model in (qwen3, mla)]
    done = subprocess.run([sys.executable, str(script), *paths], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found_all = json.loads(done.stdout.splitlines()[-1])
    assert found_all.pop("hashes differ") == []
    for found in found_all.values():
        assert found["few"] == found["all"]
        names = {line.split()[0] for line in found["few"]}
        kernels = {"norm._norm_kernel", "step.inputs._mixed_rows_kernel", "sampling.truncate._search_kernel"}
        assert {f"rapid_infer.ops.providers.triton.{name}" for name in kernels} <= names
        assert {line.split()[0] for line in found["eager"]} == names
        for kind, inputs in (("decode", ["_decode_inputs_kernel"]), ("mixed", ["_mixed_rows_kernel", "_mixed_tokens"])):
            recorded, eager = found["steps"][kind]["recorded"], found["steps"][kind]["eager"]
            # An eager engine runs what a graph records.
            assert eager == recorded
            own = [n for n, launch in enumerate(recorded) if launch.startswith(("_commit_tokens", *inputs))]
            assert own == [*range(len(inputs)), len(recorded) - 1]
        assert found["missing"] == []


@pytest.fixture
def as_if_a_gpu_were_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_gpu_may_be_here", lambda: True)
    monkeypatch.setenv("RAPID_INFER_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # Restored when the test is done, which sets it.
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))


def test_compiled_once_for_all_starts(qwen3, as_if_a_gpu_were_here, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(qwen3.path)
    entry = ModelRegistry.lookup(checkpoint.architecture)
    cls = ModelRegistry.load(entry)
    # A provider that only the engine's process has takes nothing from all others.
    pinned = {"lm_head_argmax": ["only here"]}
    args = EngineArgs(
        max_num_seqs=1, max_num_batched_tokens=2, max_model_len=64, dtype="bfloat16", enforce_eager=True,
        op_priority=pinned,
    )  # fmt: skip
    config = args.resolve(CheckpointInfo(64, "bfloat16"), DeviceInfo("cuda", True, 1 << 37))
    seen: list[tuple[int, int]] = []

    @contextmanager
    def progress() -> Iterator[Show]:
        yield lambda done, total: seen.append((done, total))

    with KernelCompiler(checkpoint.path, entry, args, DRY_RUN) as compiling:
        assert compiling.running
        compiling.aim(config, cls.read_config(checkpoint.hf_config), H200)
        last = compiling.wait(progress)
    assert last.error is None
    assert seen[0][0] == 0
    assert seen[-1] == (last.total, last.total)
    assert last.total > 10
    kernels = list((tmp_path / "kernels").glob("*/*.cubin"))
    assert len(kernels) == last.total

    with KernelCompiler(checkpoint.path, entry, args, DRY_RUN) as compiling:
        assert not compiling.running
        compiling.aim(config, cls.read_config(checkpoint.hf_config), H200)
        assert not compiling.running
        # Another GPU needs others.
        compiling.aim(config, cls.read_config(checkpoint.hf_config), GpuInfo("NVIDIA A100", (8, 0), 108))
        assert compiling.running
