"""Downloads by several processes, and by processes that are killed or interrupted."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_hub import Fault, Server
from hub_model import MODEL, SHARDS, SIZE, TAKEN, Hubs, publish, safetensors

from rapid_infer.hub.lockfile import LOCK_NAME

RATE = 1e6
FILES = {"config.json": b"{}", "model.safetensors": safetensors(7 * SIZE)}
RESOLVE = "import sys; from rapid_infer.hub import resolve; print(resolve(sys.argv[1]))"


def _take_interrupts() -> None:
    """What runs in the background of a shell ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*args: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *args], **pipes, text=True, preexec_fn=_take_interrupts)


def download(ref: str, to: Path) -> subprocess.Popen[str]:
    return start("-m", "rapid_infer.cli", "download", ref, "--to", str(to))


def part_of(directory: Path, at_least: int) -> Path:
    """The growing file, once it has so many bytes."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for part in directory.glob("model.safetensors.*.part"):
            if part.stat().st_size >= at_least:
                return part
        time.sleep(0.02)
    raise AssertionError("no part grew")


@pytest.mark.parametrize("place", ["hf", "ms"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_download_is_resumed(hubs: Hubs, tmp_path: Path, place: str, how: signal.Signals) -> None:
    ref, hub = publish(hubs, place, FILES)
    size, hub.rate = len(FILES["model.safetensors"]), RATE
    process = download(ref, tmp_path / "m")
    part_of(tmp_path / "m", 500_000)
    process.send_signal(how)
    out, err = process.communicate(timeout=10)
    assert process.returncode == (-how if how is signal.SIGKILL else 130), err
    assert "Traceback" not in err
    assert not (tmp_path / "m" / "model.safetensors").exists()
    there = part_of(tmp_path / "m", 500_000).stat().st_size
    hub.rate, before = None, len(hub.log)
    out, err = download(ref, tmp_path / "m").communicate(timeout=30)
    assert out.strip() == str(tmp_path / "m"), err
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    again = [seen for seen in hub.log[before:] if seen.file]
    assert [(seen.file, seen.headers["range"]) for seen in again] == [("model.safetensors", f"bytes={there}-")]
    assert again[0].sent == size - there


def test_an_interrupt_does_not_wait_for_a_dead_server(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "ms", {**FILES, "model-2.safetensors": safetensors(7 * SIZE - 1)})
    for file in ("model.safetensors", "model-2.safetensors"):
        hub.faults[file] = [Fault("stall", at=600_000, times=None)]
    process = download(ref, tmp_path / "m")
    part_of(tmp_path / "m", 500_000)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=5)[1] == ""
    assert process.returncode == 130


@pytest.mark.parametrize("place", ["hf", "ms"])
def test_four_processes_download_once(hubs: Hubs, place: str) -> None:
    ref, hub = publish(hubs, place)
    hub.rate = RATE
    ranks = [start("-c", RESOLVE, ref) for _ in range(4)]
    results = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, results
    assert len({out for out, _ in results}) == 1
    assert [err for _, err in results] == [""] * 4, "quiet in a pipe"
    _one_get_per_file(hub)
    assert sum(not seen.file for seen in hub.log) <= 2, "one process asked for the listing"


def test_four_commands_fill_one_directory_once(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "ms")
    hub.rate = RATE
    commands = [download(ref, tmp_path / "m") for _ in range(4)]
    results = [command.communicate(timeout=60) for command in commands]
    assert [command.returncode for command in commands] == [0] * 4, results
    _one_get_per_file(hub)
    assert sum("fetched 0 files" in err for _, err in results) == 3
    assert (tmp_path / "m" / LOCK_NAME).exists()


def _one_get_per_file(hub: Server) -> None:
    # An empty file is made without asking.
    assert {name: hub.gets(name) for name in MODEL} == {
        name: int(name in TAKEN and data != b"") for name, data in MODEL.items()
    }


@pytest.mark.parametrize(("place", "option"), [("hf", "--hf-endpoint"), ("ms", "--modelscope-endpoint")])
def test_an_endpoint_option_is_the_only_host(
    hubs: Hubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, option: str
) -> None:
    """Not even for what the clients do of themselves; their own variables, read at import, name another host."""
    ref, hub = publish(hubs, place, {name: MODEL[name] for name in ("config.json", SHARDS[0])})
    monkeypatch.setenv("HF_ENDPOINT", hubs.cdn.url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hubs.cdn.url)
    process = start("-m", "rapid_infer.cli", "download", ref, "--to", str(tmp_path / "m"), option, hub.url)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert hubs.cdn.log == []


SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "download"


@pytest.mark.parametrize("script", ["download_hf", "download_modelscope", "verify"])
def test_scripts_show_examples(script: str) -> None:
    out, err = start(str(SCRIPTS / f"{script}.py"), "--help").communicate(timeout=60)
    assert err == ""
    for model in ("Qwen3-0.6B", "Qwen3-8B", "DeepSeek-V2-Lite-Chat"):
        assert model in out


@pytest.mark.parametrize(("script", "place"), [("download_hf", "hf"), ("download_modelscope", "ms")])
def test_scripts_run_as_they_stand(
    hubs: Hubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, place: str
) -> None:
    _, hub = publish(hubs, place, FILES)
    hub.repos["Qwen/Qwen3-0.6B"] = hub.repos["org/name"]
    monkeypatch.chdir(tmp_path)
    out, err = start(str(SCRIPTS / f"{script}.py")).communicate(timeout=60)
    assert out.startswith("models/Qwen3-0.6B: 2 files, 0.00 GB"), err
    checked = start(str(SCRIPTS / "verify.py"), "models/Qwen3-0.6B")
    out, err = checked.communicate(timeout=60)
    assert checked.returncode == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["equal", "equal"]
    page = hub.url + ("/models" if place == "ms" else "") + "/org/none"
    failed = start(str(SCRIPTS / f"{script}.py"), page)
    (error,) = failed.communicate(timeout=60)[1].splitlines()
    assert "no such model" in error
    assert failed.returncode == 1
