"""`verify`, and the command line of both commands."""

import json
from pathlib import Path

import pytest
from fake_hub import Fault
from hub_model import MODEL, SHARDS, SMALL, TAKEN, WEIGHTS, Hubs, link_snapshot, publish
from tiny_chat import Run, make_run

from rapid_infer.errors import HubError
from rapid_infer.hub import fetch, verify
from rapid_infer.hub.lockfile import LOCK_NAME


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


def states(directory: Path, against: str | None = None) -> dict[str, str]:
    return {finding.path: finding.state for finding in verify(directory, against=against).findings}


def tamper(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("place", ["hf", "ms"])
def test_a_tampered_file_is_found(hubs: Hubs, tmp_path: Path, place: str) -> None:
    ref, hub = publish(hubs, place)
    made = fetch(ref, to=tmp_path / "m").directory
    hub.log.clear()
    assert states(made) == dict.fromkeys(TAKEN, "equal")
    tamper(made / WEIGHTS)
    tamper(made / "config.json")
    (made / "merges.txt").unlink()
    (made / "notes.md").write_text("mine")
    wrong = {WEIGHTS: "differs", "config.json": "differs", "merges.txt": "missing", "notes.md": "extra"}
    assert states(made) == {**dict.fromkeys(TAKEN, "equal"), **wrong}
    assert not verify(made).ok
    assert hub.log == [], "the lock is enough"
    for name in (WEIGHTS, "config.json"):
        (made / name).unlink()
    assert set(fetch(ref, to=made).fetched) == {WEIGHTS, "config.json", "merges.txt"}
    assert verify(made).ok, "as the advice says, removing and downloading mends it"


@pytest.mark.parametrize(("place", "other"), [("hf", "ms:org/name"), ("ms", "hf:org/name")])
def test_the_same_model_on_both_hubs(hubs: Hubs, tmp_path: Path, place: str, other: str) -> None:
    publish(hubs, "hf")
    publish(hubs, "ms")
    made = fetch(f"{place}:org/name", to=tmp_path / "m").directory
    assert states(made, other) == dict.fromkeys(TAKEN, "equal")
    publish(hubs, other[:2], {**MODEL, "tokenizer.json": b'{"model": 0}', "configuration.json": b"{}"})
    expected = {**dict.fromkeys(TAKEN, "equal"), "tokenizer.json": "differs", "configuration.json": "absent"}
    assert states(made, other) == expected
    assert not verify(made, against=other).ok
    publish(hubs, other[:2], {**MODEL, "configuration.json": b"{}"})
    assert verify(made, against=other).ok, "what one hub adds of its own is no fault"
    (made / WEIGHTS).unlink()
    assert states(made, other)[WEIGHTS] == "missing"
    assert not verify(made, against=other).ok


def test_any_directory_can_be_compared(hubs: Hubs, tmp_path: Path) -> None:
    publish(hubs, "hf")
    for name in (WEIGHTS, "modeling_x.py"):
        (tmp_path / name).write_bytes(MODEL[name])
    found = states(tmp_path, "hf:org/name")
    assert {name for name, state in found.items() if state == "equal"} == {WEIGHTS, "modeling_x.py"}
    assert found[SHARDS[1]] == "missing"
    with pytest.raises(HubError, match=f"got no {LOCK_NAME}.*name a source instead"):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("directory", "against", "message"),
    [
        ("none", None, "got no directory"),
        (".", "org/name", "got 'org/name'; expected hf:org/name or ms:org/name"),
        (".", "hf:org/none", "no such model"),
        (".", "ms:org/none@v1", "no such model"),
    ],
)
def test_bad_input(hubs: Hubs, tmp_path: Path, directory: str, against: str | None, message: str) -> None:
    with pytest.raises(HubError, match=message):
        verify(tmp_path / directory, against=against)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "files": [{"path": "../x"}]}'])
def test_a_lock_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_NAME).write_text(text)
    with pytest.raises(HubError, match=LOCK_NAME):
        verify(tmp_path)


def test_the_lock_cannot_point_outside(hubs: Hubs, tmp_path: Path) -> None:
    made = fetch(publish(hubs, "hf", SMALL)[0], to=tmp_path / "m").directory
    lock = json.loads((made / LOCK_NAME).read_text())
    lock["files"][0]["path"] = "../outside"
    (made / LOCK_NAME).write_text(json.dumps(lock))
    with pytest.raises(HubError, match="refused"):
        verify(made)


# The command line


def test_download_command(hubs: Hubs, tmp_path: Path, run: Run) -> None:
    publish(hubs, "hf")
    to = str(tmp_path / "m")
    code, out, _ = run("download", "org/name", "--to", to, "--dry-run")
    assert code == 0
    assert f"would fetch {len(TAKEN)} files" in out
    assert WEIGHTS in out
    code, out, err = run("download", "org/name", "--to", to)
    assert (code, out) == (0, f"{to}\n")
    assert f"org/name from Hugging Face ({hubs.hf.url}): the first in order" in err
    code, out, err = run("download", "org/name", "--to", to, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert (report["source"], report["directory"], report["fetched"]) == ("huggingface", to, [])
    assert report["bytes"] == sum(len(MODEL[name]) for name in TAKEN)
    assert {file["path"] for file in report["files"]} == TAKEN


def test_force_is_an_option(hubs: Hubs, tmp_path: Path, run: Run) -> None:
    publish(hubs, "hf", SMALL)
    hubs.hf.repos["org/other"] = hubs.hf.repos["org/name"]
    fetch("org/other", to=tmp_path / "m")
    code, _, err = run("download", "org/name", "--to", str(tmp_path / "m"))
    assert code == 2
    assert "holds org/other (2 files" in err
    assert run("download", "org/name", "--to", str(tmp_path / "m"), "--force")[0] == 0


def test_verify_command(hubs: Hubs, tmp_path: Path, run: Run) -> None:
    publish(hubs, "ms")
    publish(hubs, "hf")
    made = str(fetch("ms:org/name", to=tmp_path / "m").directory)
    code, out, _ = run("verify", made)
    assert code == 0
    assert f"{len(TAKEN)} files" in out
    code, out, _ = run("verify", made, "--against", "hf:org/name", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)
    assert {finding["algorithm"] for finding in report["findings"]} == {"sha256", "git-sha1"}
    tamper(tmp_path / "m" / WEIGHTS)
    code, out, _ = run("verify", made)
    assert code == 1
    assert f"{WEIGHTS}" in out.splitlines()[1]
    assert "1 differ, 0 are missing" in out
    assert json.loads(run("verify", made, "--json")[1])["ok"] is False
    (tmp_path / "m" / WEIGHTS).unlink()
    code, out, _ = run("verify", made)
    assert code == 1, "a missing file alone is a fault"
    assert "0 differ, 1 are missing" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["download", "nothing"], "got no name that a hub can have; expected org/name"),
        (["download", "demo"], "got no name that a hub can have; expected org/name"),
        (["download", "https://hub.example/org/name"], "on no hub that is known"),
        (["download", "hf:x"], "expected hf:org/name"),
        (["download", "org/none"], "no such model"),
        (["download", "hf:org/name@none"], "no such revision"),
        (["download", "org/name", "--hub", "github"], "hub: got 'github'; expected one of auto, huggingface"),
        (["download", "org/name", "--offline"], "offline, no local directory 'org/name', and it is not in the cache"),
        (["download", "org/name", "--include", "nothing"], "matches none of"),
        (["download", "org/name", "--to", "/dev/null"], "/dev/null: got a file"),
        (["download", "org/name", "--to", "/proc/none"], "/proc/none"),
        (["verify", "nowhere"], "got no directory"),
    ],
)
def test_mistakes(hubs: Hubs, run: Run, arguments: list[str], message: str) -> None:
    publish(hubs, "hf", SMALL)
    publish(hubs, "ms", SMALL)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_model_runs_by_its_name(hubs: Hubs, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    from rapid_infer import LLM, SamplingParams
    from rapid_infer.testing.tiny import TINY, make_checkpoint

    make_checkpoint(tmp_path / "made", Qwen3Config(**TINY, head_dim=16))
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    publish(hubs, "ms", files)
    hubs.ms.faults["model.safetensors"] = [Fault("truncate", at=10_000)]
    hubs.hf.close()
    options = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 20}
    greedy = SamplingParams(temperature=0, max_tokens=4)
    answers = []
    linked = link_snapshot(tmp_path / "links", files)
    for model in ("org/name", str(linked), str(tmp_path / "made")):
        with LLM(model, **options) as llm:
            answers.append(llm.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] == answers[2]
    assert hubs.ms.gets("model.safetensors") == 2
