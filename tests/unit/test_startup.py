"""A start comes about in order: kernels compile beside the loading, and nothing is launched before they are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rapid_infer import startup
from rapid_infer.config import EngineArgs
from rapid_infer.errors import ConfigError
from rapid_infer.testing import TINY, make_checkpoint
from rapid_infer.worker.model_runner import ModelRunner
from rapid_infer.worker.worker import Worker

PHASES = ("build", "load", "profile", "allocate", "capture")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), AutoConfig.for_model("llama", **TINY))


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, events: list[str]) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def test_the_phases_of_a_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("__enter__", "aim", "wait", "__exit__"):
        noted(monkeypatch, startup.KernelCompiler, name, events)
    for name in PHASES:
        noted(monkeypatch, Worker, name, events)
    monkeypatch.setattr(startup, "Tokenizer", lambda path: events.append("tokenizer"))
    noted(monkeypatch, ModelRunner, "launch_forward", events)
    args = EngineArgs(device="cpu", dtype="float32", kv_cache_memory_bytes=1_000_000)
    started = startup.start_engine(*startup.locate(str(path), args), args, with_tokenizer=True)
    assert events == [
        *("__enter__", "aim", "tokenizer"),
        *("build", "load", "wait", "profile", "allocate", "launch_forward", "capture", "__exit__"),
    ]
    assert started.tokenizer is None
    assert (started.info.vocab_size, started.info.dtype) == (TINY["vocab_size"], "float32")
    started.core.close()


def test_warming_up_needs_a_gpu(path: Path) -> None:
    args = EngineArgs(device="cpu")
    with pytest.raises(ConfigError, match="this process sees none; run it on a machine with a GPU"):
        startup.compile_kernels(*startup.locate(str(path), args), args)
