"""The command line under torchrun: the first process owns the engine, and the others serve it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_chat import make_chat_model

from rapid_infer.errors import ConfigError
from rapid_infer.executors.external import Launch, gather


@pytest.mark.slow
def test_the_command_line_runs_on_the_processes_of_torchrun(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model")
    command = ["-m", "rapid_infer", "generate", model, "--greedy", "--json", "-p", "hello", "--max-tokens", "6"]
    options = ["--dtype", "float32", "--device", "cpu", "--max-model-len", "64"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone, several = (
        subprocess.run([*start, *command, *options, *tp], capture_output=True, text=True, timeout=200, check=False)
        for start, tp in (([sys.executable], []), (launcher, ["-tp", "2"]))
    )
    assert several.returncode == 0, several.stderr
    assert json.loads(alone.stdout)["results"] == json.loads(several.stdout)["results"]


def test_a_launcher_with_another_number_of_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="torchrun started 4 processes and tensor_parallel_size=2"):
        gather(Launch(0, 4, "127.0.0.1", 1, "key"), 2)


def test_a_rank_left_in_the_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert Launch.of_environment() is None
    assert "TORCHELASTIC_RUN_ID" not in os.environ
