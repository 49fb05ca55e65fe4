"""The list of a model's kernels, the processes that compile, and what the starting engine hears of them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from rapid_infer.config import EngineArgs
from rapid_infer.device import GpuInfo
from rapid_infer.errors import ConfigError
from rapid_infer.ops.precompile import compiler, process
from rapid_infer.ops.precompile.cache import VARIABLE, KernelList, use_kernel_cache
from rapid_infer.ops.precompile.compiler import KernelCompiler
from rapid_infer.ops.precompile.crew import Crew
from rapid_infer.ops.precompile.process import Progress
from rapid_infer.registry import Entry

H200, A100 = GpuInfo("NVIDIA H200", (9, 0), 132), GpuInfo("NVIDIA A100", (8, 0), 108)
ENTRY = Entry("Some", "some.module:Some", "some", "1.0", "entry point")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAPID_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    return use_kernel_cache()


def test_a_list_holds_for_what_kernels_depend_on(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(entry: Entry = ENTRY, **options: Any) -> str:
        return KernelList.of(cache, checkpoint, entry, EngineArgs(**options)).key

    assert key() == key(seed=3, load_format="dummy", kv_cache_memory_bytes=1 << 20)
    keys = [key(), key(max_num_seqs=3), key(dtype="float16"), key(op_priority={"linear": ["torch"]})]
    keys.append(key(replace(ENTRY, version="1.1")))
    (checkpoint / "config.json").write_text('{"hidden_size": 3}')
    keys.append(key())
    site = checkpoint.parent
    monkeypatch.syspath_prepend(str(site))
    metadata = site / "some_ops-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: some-ops\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rapid_infer.ops]\nsome = some_ops:ops\n")
    keys.append(key())
    for name in ("some", "some_ops"):
        (site / name / "attention").mkdir(parents=True)
        for file in ("__init__.py", "attention/__init__.py", "attention/prefill.py"):
            for source in ("one = 1", "one = 1.0"):
                (site / name / file).write_text(source)
                keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_list_is_complete_while_all_it_names_is_there(checkpoint: Path, cache: Path) -> None:
    kernels = KernelList.of(cache, checkpoint, ENTRY, EngineArgs())
    assert not kernels.complete()
    for name in ("one", "two"):
        (cache / name).mkdir()
    kernels.write(H200, ["one", "two"])
    assert kernels.complete(H200)
    assert kernels.complete()
    assert not kernels.complete(A100)
    kernels.write(A100, ["one"])
    (cache / "two").rmdir()
    assert not kernels.complete(H200)
    assert kernels.complete(A100)
    kernels.path.write_text("{ half")
    assert not kernels.complete()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "kernels"))
    with pytest.raises(ConfigError, match=r"compiled kernels cannot be kept in .*; set RAPID_INFER_CACHE or TRITON"):
        use_kernel_cache()


def test_the_cache_is_the_runtimes_own_unless_triton_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "set first, so that it is restored")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("RAPID_INFER_CACHE", str(tmp_path))
    assert use_kernel_cache() == tmp_path / "kernels"
    assert os.environ[VARIABLE] == str(tmp_path / "kernels")


@pytest.fixture
def ends() -> Iterator[tuple[IO[str], IO[str]]]:
    """What can be read from once nobody waits for the jobs, which is when the other one is closed."""
    read, write = os.pipe()
    with os.fdopen(read) as parent, os.fdopen(write, "w") as waiting:
        yield parent, waiting


@pytest.fixture
def parent(ends: tuple[IO[str], IO[str]]) -> IO[str]:
    return ends[0]


@pytest.mark.parametrize("processes", [1, 3])
def test_jobs_are_done_and_faults_told(processes: int, parent: IO[str]) -> None:
    def fails() -> str:
        raise ValueError("no such kernel")

    with Crew(parent) as crew:
        crew.start([lambda: "alone"], 1)
        crew.start([lambda n=n: f"kernel {n}" for n in range(5)] + [fails], processes)
        assert sorted(crew.results()) == ["alone", *(f"kernel {n}" for n in range(5))]
    assert crew.total == 7
    assert crew.failed == {6: "ValueError: no such kernel"}


def test_a_process_that_dies_leaves_the_others(parent: IO[str]) -> None:
    def dies() -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    with Crew(parent) as crew:
        crew.start([dies], 1)
        crew.start([lambda: "done"], 1)
        assert list(crew.results()) == ["done"]
    assert crew.failed == {0: "its process died"}


def test_what_failed_is_tried_once_more(parent: IO[str], tmp_path: Path) -> None:
    def fails_once(name: str, how: Callable[[], None]) -> str:
        if not (tmp_path / name).exists():
            (tmp_path / name).touch()
            how()
        return name

    def raises() -> None:
        raise MemoryError

    with Crew(parent) as crew:
        crew.start([partial(fails_once, "one", raises), lambda: "fine"], 1)
        crew.start([partial(fails_once, "two", lambda: os.kill(os.getpid(), signal.SIGKILL))], 1)
        assert sorted(crew.results()) == ["fine", "one", "two"]
    assert not crew.failed


def test_processes_end_when_nobody_waits_any_more(ends: tuple[IO[str], IO[str]]) -> None:
    parent, waiting = ends

    def never() -> str:
        waiting.close()
        signal.pause()
        return ""

    with Crew(parent) as crew:
        crew.start([never], 1)
        waiting.close()
        with pytest.raises(EOFError, match="nobody waits"):
            list(crew.results())
    assert all(not Path(f"/proc/{child}").exists() for child in crew._children)


class Says:
    """Stands in for the process: a script that takes two messages, says these words and ends with this code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[bytes], code: int = 0) -> None:
        script = tmp_path / "script"
        script.write_text(
            f"#!{sys.executable}\nimport socket, sys\nsys.path[:] = {sys.path}\n"
            "from rapid_infer.processes.channel import Channel\n"
            "channel = Channel(socket.socket(fileno=int(sys.argv[-1])))\n"
            f"channel.receive(), channel.receive(), [channel.send(word) for word in {words}]\nsys.exit({code})\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setattr(compiler, "_gpu_may_be_here", lambda: True)


def waited_for(checkpoint: Path) -> tuple[Progress, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []

    @contextmanager
    def progress() -> Any:
        yield lambda done, total: seen.append((done, total))

    with KernelCompiler(checkpoint, ENTRY, EngineArgs(), "") as compiling:
        compiling.aim(None, None, H200)  # type: ignore[arg-type]
        last = compiling.wait(progress)
        assert not compiling.running
    return last, seen


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ([Progress(0, 2), Progress(1, 2), Progress(2, 2), Progress(2, 2, seconds={})], 0, None),
        ([Progress(0, 2), Progress(1, 2), Progress(error="1 of 2 kernels failed")], 0, "1 of 2"),
        ([Progress(0, 2)], 3, "ended with exit code 3"),
        ([], 7, "ended with exit code 7"),
    ],
)
def test_the_engine_starts_whatever_became_of_the_kernels(
    words: list[Progress],
    code: int,
    error: str | None,
    checkpoint: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Says(monkeypatch, tmp_path, list(map(msgspec.json.encode, words)), code)
    with caplog.at_level(logging.WARNING, logger="rapid_infer"):
        last, seen = waited_for(checkpoint)
    told = [(word.done, word.total) for word in words if word.error is None]
    assert seen[: len(told)] == told
    if error is None:
        assert last == words[-1]
        assert not caplog.text
    else:
        assert error in (last.error or "")
        assert "kernels are compiled one after another" in caplog.text


@pytest.mark.parametrize(
    ("words", "script", "error"),
    [([], "#!/bin/sh\nexit 7\n", "ended with exit code 7"), ([b"hello"], None, "is no message: JSON is malformed")],
)
def test_a_process_that_cannot_be_talked_to_ends_no_start(
    words: list[bytes],
    script: str | None,
    error: str,
    checkpoint: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Says(monkeypatch, tmp_path, words)
    if script is not None:
        (tmp_path / "script").write_text(script)
    last, _ = waited_for(checkpoint)
    assert error in (last.error or "")


def test_where_no_process_can_be_started_there_is_none(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_gpu_may_be_here", lambda: True)
    monkeypatch.setattr(sys, "executable", str(checkpoint / "no such program"))
    last, _ = waited_for(checkpoint)
    assert last == Progress()
    assert "no process could be started" in caplog.text


def test_a_process_that_says_nothing_is_given_up(
    checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Says(monkeypatch, tmp_path, [])
    (tmp_path / "script").write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(compiler, "SILENCE", 0.05)
    last, _ = waited_for(checkpoint)
    assert "no kernel in" in (last.error or "")


def test_without_a_gpu_there_is_no_process(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_gpu_may_be_here", lambda: False)
    with KernelCompiler(checkpoint, ENTRY, EngineArgs(), "") as compiling:
        assert not compiling.running
    monkeypatch.setattr(compiler, "_gpu_may_be_here", lambda: True)
    with KernelCompiler(checkpoint, ENTRY, EngineArgs(device="cpu"), "") as compiling:
        assert not compiling.running


def test_nothing_of_it_imports_torch() -> None:
    for module in (compiler, process):
        assert not hasattr(module, "torch")


def test_dynamo_is_imported_only_for_what_is_asked_of_it() -> None:
    code = """
import sys
from rapid_infer.ops.precompile.prepare import import_dynamo_when_needed
import_dynamo_when_needed()
import torch
assert torch.where(torch.empty(2, device="meta") > 0, 1.0, 0.0).shape == (2,)
assert "torch._dynamo.config" not in sys.modules
assert torch._dynamo.config.recompile_limit > 0
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.disable(lambda: 3)() == 3
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
