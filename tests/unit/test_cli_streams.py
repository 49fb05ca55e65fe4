"""What the command line does with its standard streams: full, closed, or of another encoding."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_chat import Run, make_chat_model, make_run

from rapid_infer.cli import app

CPU = ("--device", "cpu", "--dtype", "float32", "--greedy", "--max-tokens", "3")
QUICK_DOCTOR = ["doctor", "--offline", "--no-run"]
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
FULL = "error: the output cannot be written: No space left on device; what is missing is lost\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back what `--offline` sets for the process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


@needs_full
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "args",
    [
        *(["--help"], ["--version"], ["models"], ["models", "--json"], QUICK_DOCTOR, [*QUICK_DOCTOR, "--json"]),
        *(["inspect", "MODEL"], ["inspect", "MODEL", "--json"], ["chat", "MODEL", *CPU]),
        *(["generate", "MODEL", "-p", "Hi", *CPU, *more] for more in ([], ["--json"], ["-n", "2"])),
    ],
    ids=" ".join,
)
def test_a_full_device_is_one_error(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    unbuffered: bool,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    with open("/dev/full", "wb", buffering=0 if unbuffered else -1) as device:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(device, write_through=unbuffered))
        with pytest.raises(SystemExit) as left:
            app.run([model if arg == "MODEL" else arg for arg in args])
    assert left.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] + "\n" == FULL


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["--version"], ["models", "--json"]])
def test_a_full_device_leaves_python_nothing_to_complain_of(args: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "rapid_infer.cli", *args]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("args", [["models", "--json"], ["generate", "MODEL", "-p", "Hi", *CPU]], ids=" ".join)
def test_a_reader_that_has_seen_enough_is_no_error(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as left:
            app.run([model if arg == "MODEL" else arg for arg in args])
    assert (left.value.code, capsys.readouterr().err) == (1, "")


def test_another_error_of_the_system_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(table: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "cache")

    monkeypatch.setattr("rapid_infer.cli.models.check_models", fail)
    with open(tmp_path / "out", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(OSError, match="cache"):
            app.run(["models", "--check"])


def test_closed_streams_are_empty(model: str, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = run("generate", model)
    assert (code, out) == (2, "")
    assert err.startswith("error: no prompt")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    for args in (["models"], QUICK_DOCTOR, ["chat", model], ["generate", model, "-p", "Hi", *CPU]):
        assert run(*args)[0] == 0


def test_a_character_that_the_output_does_not_know_ends_nothing(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        code, _, _ = run("generate", model, "-p", "é1", "-p", "é2", *CPU)
    assert code == 0
    assert "[1] ?1\n" in (tmp_path / "out").read_text("ascii")
