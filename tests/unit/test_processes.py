"""Child processes: what they find, how they are told of, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import ChildProcess, start_module

ECHO = """
import json, os, signal, sys
from rapid_infer.processes.channel import Channel
from rapid_infer.processes.launch import take_over
if __name__ == "__main__":
    channel = Channel(take_over(int(sys.argv[-1])))
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    kept = os.get_inheritable(channel.sock.fileno())
    channel.send(json.dumps([sys.argv[1:-1], os.environ["CHILDS"], ignored, kept]).encode())
    code = channel.receive()
    if code:
        sys.exit(int(code))
    signal.pause()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in a folder that only `sys.path` names."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "childmodule.py").write_text(ECHO)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return "childmodule"


def test_a_child_finds_what_this_process_finds_and_nothing_in_its_folder(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    child = ChildProcess("rank 1", module, "a", "b", env={"CHILDS": "own"})
    try:
        channel = Channel(child.sock)
        assert json.loads(channel.receive() or b"null") == [["a", "b"], "own", True, False]
        os.kill(child.process.pid, signal.SIGINT)
        channel.send(b"7")
        assert channel.receive() is None
        assert child.how_it_ended() == f"rank 1 (pid {child.process.pid}) ended with exit code 7"
    finally:
        child.stop(0)
    assert child.sock.fileno() == -1


def test_a_child_that_stays_is_killed(module: str) -> None:
    child = ChildProcess("rank 1", module, env={"CHILDS": "own"})
    Channel(child.sock).receive()
    child.stop(0)
    assert child.process.returncode == -signal.SIGKILL
    assert child.how_it_ended() == f"rank 1 (pid {child.process.pid}) was killed by SIGKILL"


def test_a_module_can_be_started_with_pipes() -> None:
    process = start_module("base64", "-e", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.communicate(b"x")[0] == b"eA==\n"
