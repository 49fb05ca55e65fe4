"""What a download brings and where to, through the real clients: selection, revisions, locks, and the choice of hub."""

import hashlib
import json
import logging
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from fake_hub import Fault
from hub_model import MODEL, SHARDS, SIZE, SMALL, TAKEN, WEIGHTS, Hubs, publish, safetensors, stored

from rapid_infer.errors import HubError
from rapid_infer.hub import fetch, fill, http, resolve
from rapid_infer.hub.lockfile import LOCK_NAME

BOTH = pytest.mark.parametrize("place", ["hf", "ms"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "DEFAULT_POLICY", http.Policy(attempts=2, first_delay=0.01, read_timeout=1))


@BOTH
def test_what_loading_needs_is_taken(hubs: Hubs, place: str) -> None:
    ref, _ = publish(hubs, place)
    hubs.hf.page = 4
    made = resolve(ref)
    assert stored(made) == {name: MODEL[name] for name in TAKEN}
    lock = json.loads((made / LOCK_NAME).read_text())
    assert (lock["source"], lock["repo"]) == ({"hf": "huggingface", "ms": "modelscope"}[place], "org/name")
    assert lock["commit"] == made.name
    algorithms = {file["path"]: file["algorithm"] for file in lock["files"]}
    assert algorithms[WEIGHTS] == "sha256"
    assert algorithms["config.json"] == ("git-sha1" if place == "hf" else "sha256")


@BOTH
def test_a_second_start_asks_nobody_and_hashes_nothing(hubs: Hubs, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    ref, hub = publish(hubs, place)
    made = resolve(ref)
    hub.log.clear()
    monkeypatch.setattr(socket.socket, "connect", _no_socket)
    for algorithm in ("sha1", "sha256"):
        monkeypatch.delattr(hashlib, algorithm)
    assert resolve(ref) == made
    assert hub.log == []


@pytest.mark.parametrize(
    ("listed", "taken"),
    [
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["pytorch_model-1-of-1.bin", "pytorch_model.bin.index.json"], None),
        (["x.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"], ["x.safetensors"]),
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
    ],
)
def test_one_weight_format(hubs: Hubs, tmp_path: Path, listed: list[str], taken: list[str] | None) -> None:
    publish(hubs, "hf", {"config.json": b"{}", **dict.fromkeys(listed, safetensors(100))})
    done = fetch("hf:org/name", to=tmp_path / "m")
    assert set(done.fetched) == {"config.json", *(taken or listed)}


@BOTH
@pytest.mark.parametrize("written", ["@v2", "option"])
def test_revision_and_directory(hubs: Hubs, tmp_path: Path, place: str, written: str) -> None:
    publish(hubs, place)
    other = {**SMALL, "config.json": b'{"v": 2}'}
    ref, _ = publish(hubs, place, other, revision="v2")
    given: dict[str, Any] = {"revision": "v2"} if written == "option" else {}
    done = fetch(ref + ("" if given else written), to=tmp_path / "deep" / "dir", **given)
    assert done.directory == tmp_path / "deep" / "dir"
    assert stored(done.directory) == other
    assert json.loads((done.directory / LOCK_NAME).read_text())["revision"] == "v2"
    assert resolve(str(done.directory)) == done.directory
    assert stored(resolve(ref))["config.json"] == MODEL["config.json"]
    assert stored(resolve(ref, revision="v2"))["config.json"] == b'{"v": 2}'


def test_a_commit_is_a_revision(hubs: Hubs) -> None:
    publish(hubs, "hf", SMALL)
    commit = hubs.hf.commit("org/name")
    publish(hubs, "hf", {**SMALL, "config.json": b"[]"})
    hubs.hf.repos["org/name"]["old"] = dict(SMALL)
    made = resolve(f"hf:org/name@{commit}")
    assert made.name == commit
    assert stored(made) == SMALL


@BOTH
@pytest.mark.parametrize("written", ["org/none", "org/name@none"])
def test_unknown_names_are_errors(hubs: Hubs, tmp_path: Path, place: str, written: str) -> None:
    publish(hubs, place, SMALL)
    with pytest.raises(HubError, match=r"no such (model|revision).*check the name"):
        fetch(f"{place}:{written}", to=tmp_path / "m")
    assert stored(tmp_path / "m") == {}


@BOTH
def test_an_empty_repository_is_an_error(hubs: Hubs, place: str) -> None:
    ref, _ = publish(hubs, place, {})
    with pytest.raises(HubError, match="got an empty listing"):
        resolve(ref)


def test_what_downloading_itself_uses_is_left_out(hubs: Hubs, tmp_path: Path) -> None:
    """As when somebody uploads a directory as it is."""
    ref, _ = publish(hubs, "hf", {**SMALL, LOCK_NAME: b"{}", ".rapid-infer.lock": b"x", "a.part": b"x"})
    assert set(fetch(ref, to=tmp_path, include=("*",)).fetched) == set(SMALL)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["repo"] == "org/name"


def test_no_weights_is_an_error_that_lists_what_there_is(hubs: Hubs) -> None:
    publish(hubs, "hf", {"config.json": b"{}", "model.gguf": b"x"})
    with pytest.raises(HubError, match=r"no safetensors and no pytorch_model\.bin; it has config\.json, model\.gguf"):
        resolve("hf:org/name")


def test_include_takes_what_matches_and_is_no_model(hubs: Hubs) -> None:
    ref, hub = publish(hubs, "hf")
    done = fetch(ref, include=("*.py", "config.json"))
    assert set(done.fetched) == {"config.json", "modeling_x.py"}
    with pytest.raises(HubError, match="matches none of"):
        fetch(ref, include=("*.nothing",))
    assert stored(resolve(ref)).keys() == TAKEN | {"modeling_x.py"}, "the rest comes when the model is wanted"
    assert hub.gets("config.json") == 1
    fetch(ref, include=("*.py",))
    assert stored(resolve(ref)).keys() == TAKEN | {"modeling_x.py"}


@BOTH
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_an_empty_file_is_refused_before_the_first_byte(hubs: Hubs, tmp_path: Path, place: str, name: str) -> None:
    ref, hub = publish(hubs, place, {**MODEL, name: b""})
    for dry_run in (True, False):
        with pytest.raises(HubError, match=rf"lists {name} with 0 bytes, which no model can be loaded from"):
            fetch(ref, to=tmp_path / "m", dry_run=dry_run)
    assert not any(seen.file for seen in hub.log)
    publish(hubs, place, {**MODEL, "original/x.bin": b""})
    assert set(fetch(ref, to=tmp_path / "m").fetched) == TAKEN, "what is not taken may be empty"


DAMAGED = {
    "cut off": MODEL[WEIGHTS][:-1],
    "cut off in the header": MODEL[WEIGHTS][:30],
    "one byte": b"x",
    "more than its header says": MODEL[WEIGHTS] + b"x",
    "a pointer of git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 300000\n",
}


@pytest.mark.parametrize("place", ["hf", "ms"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_is_damaged_on_the_hub_is_refused(hubs: Hubs, tmp_path: Path, place: str, kind: str) -> None:
    ref, hub = publish(hubs, place, {**SMALL, WEIGHTS: DAMAGED[kind]})
    with pytest.raises(HubError, match=rf"{WEIGHTS}: got a damaged safetensors file of {len(DAMAGED[kind])} bytes"):
        fetch(ref, to=tmp_path / "m")
    assert WEIGHTS not in stored(tmp_path / "m")
    assert hub.gets(WEIGHTS) == 1, "asking again does not help"


def test_a_damaged_upload_is_left_for_the_next_hub(hubs: Hubs, tmp_path: Path) -> None:
    publish(hubs, "ms", SMALL)
    for name in ("config.json", WEIGHTS):
        publish(hubs, "hf", {**SMALL, name: b""})
        assert fetch("org/name", to=tmp_path / name).source == "modelscope"


def test_an_empty_file_of_an_older_version_is_seen_at_the_start(hubs: Hubs, tmp_path: Path) -> None:
    """A lock may say 0 bytes: once such files were taken as downloaded."""
    made = fetch(publish(hubs, "hf", SMALL)[0], to=tmp_path / "m").directory
    lock = json.loads((made / LOCK_NAME).read_text())
    next(file for file in lock["files"] if file["path"] == WEIGHTS)["size"] = 0
    (made / LOCK_NAME).write_text(json.dumps(lock))
    (made / WEIGHTS).write_bytes(b"")
    with pytest.raises(HubError, match=rf"{WEIGHTS} is empty"):
        resolve(str(made))


def test_dry_run_fetches_nothing(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "ms")
    done = fetch(ref, to=tmp_path / "m", dry_run=True)
    assert set(done.fetched) == TAKEN
    assert not (tmp_path / "m").exists()
    assert not any(seen.file for seen in hub.log)


def test_a_new_commit_fetches_what_changed(hubs: Hubs) -> None:
    ref, hub = publish(hubs, "ms")
    first = resolve(ref)
    publish(hubs, "ms", {**MODEL, "README.md": b"# Better\n"})
    assert resolve(ref) == first, "a start does not look for news"
    done = fetch(ref)
    assert done.fetched == ("README.md",)
    assert resolve(ref) == done.directory != first
    assert (done.directory / WEIGHTS).samefile(first / WEIGHTS)
    assert hub.gets(WEIGHTS) == 1


def test_a_file_of_another_commit_that_was_cut_off_is_not_taken_over(hubs: Hubs) -> None:
    ref, _ = publish(hubs, "ms")
    first = resolve(ref)
    (first / WEIGHTS).write_bytes(MODEL[WEIGHTS][:-1])
    publish(hubs, "ms", {**MODEL, "README.md": b"# Better\n"})
    done = fetch(ref)
    assert set(done.fetched) == {"README.md", WEIGHTS}
    assert stored(done.directory)[WEIGHTS] == MODEL[WEIGHTS]


def test_a_file_of_another_size_is_seen_at_the_start(hubs: Hubs) -> None:
    ref, hub = publish(hubs, "hf", SMALL)
    made = resolve(ref)
    (made / WEIGHTS).write_bytes(SMALL[WEIGHTS][:-1])
    with pytest.raises(HubError, match=rf"{WEIGHTS} has 299999 bytes where 300000 are expected"):
        resolve(ref, offline=True)
    with pytest.raises(HubError, match="has 299999 bytes"):
        resolve(str(made))
    assert resolve(ref) == made
    assert stored(made) == SMALL
    assert hub.gets("config.json") == 1


def test_an_update_that_fails_leaves_what_was_there(hubs: Hubs) -> None:
    ref, hub = publish(hubs, "hf", SMALL)
    first = resolve(ref)
    publish(hubs, "hf", {**SMALL, WEIGHTS: safetensors(100)})
    hub.faults[WEIGHTS] = [Fault("404", times=None)]
    with pytest.raises(HubError):
        fetch(ref)
    assert resolve(ref, offline=True) == first
    hub.faults.clear()
    assert fetch(ref).directory == resolve(ref) != first


def test_a_directory_moves_to_another_commit(hubs: Hubs, tmp_path: Path) -> None:
    publish(hubs, "hf")
    fetch("hf:org/name", to=tmp_path / "m")
    # As long as before: only its digest tells that it is another file.
    changed = {**SMALL, WEIGHTS: MODEL[SHARDS[1]]}
    publish(hubs, "hf", changed, revision="v2")
    (tmp_path / "m" / "mine.txt").write_text("mine")
    assert fetch("hf:org/name@v2", to=tmp_path / "m").fetched == (WEIGHTS,)
    assert stored(tmp_path / "m") == {**changed, "mine.txt": b"mine"}


@BOTH
def test_a_directory_of_another_model_is_left_alone(hubs: Hubs, tmp_path: Path, place: str) -> None:
    ref, hub = publish(hubs, place)
    fetch(ref, to=tmp_path / "m")
    held = stored(tmp_path / "m")
    files = {"config.json": b"[]", "model.safetensors": safetensors(100)}
    hub.repos["org/other"] = {"main": files, "master": files}
    other = f"{place}:org/other"
    attempts: list[dict[str, Any]] = [{}, {"include": ("*.json",)}, {"dry_run": True}]
    for options in attempts:
        with pytest.raises(HubError, match=rf"holds org/name \({len(TAKEN)} files .*; expected .* org/other.*--force"):
            fetch(other, to=tmp_path / "m", **options)
    assert stored(tmp_path / "m") == held
    assert fetch(other, to=tmp_path / "m", force=True).fetched == ("config.json", "model.safetensors")
    assert stored(tmp_path / "m") == files


def test_a_hub_that_spells_a_name_otherwise_is_no_other_model(hubs: Hubs, tmp_path: Path) -> None:
    publish(hubs, "hf", SMALL)
    publish(hubs, "ms", SMALL)
    hubs.ms.repos["Org/Name"] = hubs.ms.repos["org/name"]
    fetch("hf:org/name", to=tmp_path / "m")
    assert fetch("ms:Org/Name", to=tmp_path / "m").fetched == ()


@pytest.mark.parametrize("listed", ["same", "changed", "gone"])
@pytest.mark.parametrize("edit", [b'{"architectures": ["X"], "rope_scaling": {}}', b'{"architectures": ["Y"]}'])
def test_an_edited_file_is_never_overwritten(hubs: Hubs, tmp_path: Path, listed: str, edit: bytes) -> None:
    """Of another size or of the same: whatever the hub lists by now."""
    ref, _ = publish(hubs, "hf", MODEL)
    fetch(ref, to=tmp_path / "m")
    (tmp_path / "m" / "config.json").write_bytes(edit)
    new = {"same": MODEL["config.json"], "changed": b"[]"}.get(listed)
    publish(hubs, "hf", {name: data for name, data in {**MODEL, "config.json": new}.items() if data is not None})
    if listed == "same" and len(edit) == len(MODEL["config.json"]):
        assert fetch(ref, to=tmp_path / "m").fetched == ()
    else:
        with pytest.raises(HubError, match=r"in the way: config\.json; .*were changed since; .*--force"):
            fetch(ref, to=tmp_path / "m")
        assert stored(tmp_path / "m")["config.json"] == edit
        fetch(ref, to=tmp_path / "m", force=True)
        assert stored(tmp_path / "m").get("config.json") == new


def test_an_edited_configuration_is_used_and_said(hubs: Hubs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = fetch(publish(hubs, "hf")[0], to=tmp_path / "m").directory
    (made / "config.json").write_text('{"architectures": ["X"], "rope_scaling": {"type": "yarn"}}')
    with caplog.at_level(logging.WARNING, "rapid_infer"):
        assert resolve(str(made)) == made
    assert "config.json has" in caplog.text
    (made / "merges.txt").write_text("a")
    with pytest.raises(HubError, match=r"merges\.txt has 1 bytes where 4 are expected; .*--to .*/m --force"):
        resolve(str(made))
    fetch("hf:org/name", to=made, force=True)
    (made / "config.json").write_text("")
    with pytest.raises(HubError, match=r"config\.json has 0 bytes"):
        resolve(str(made))


def test_files_of_others_are_kept_or_named(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "hf", SMALL)
    (tmp_path / WEIGHTS).write_bytes(SMALL[WEIGHTS])
    (tmp_path / "config.json").write_text("edited")
    with pytest.raises(HubError, match=r"other files in the way: config\.json.*move them away"):
        fetch(ref, to=tmp_path)
    assert (tmp_path / "config.json").read_text() == "edited"
    (tmp_path / "config.json").unlink()
    assert fetch(ref, to=tmp_path).fetched == ("config.json",)
    assert hub.gets(WEIGHTS) == 0, "the right bytes were there"


def test_an_incomplete_directory_says_how_to_go_on(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "hf", SMALL)
    hub.faults[WEIGHTS] = [Fault("404", times=None)]
    with pytest.raises(HubError):
        fetch(ref, to=tmp_path / "m")
    with pytest.raises(
        HubError, match=rf"{WEIGHTS} is missing; finish the download: rapid-infer download hf:org/name@"
    ):
        resolve(str(tmp_path / "m"))


def test_a_full_disk_is_known_before(hubs: Hubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, hub = publish(hubs, "hf")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(HubError, match=rf"got 0\.0 GB of free space; expected 0\.1 GB for {len(TAKEN)} files"):
        resolve(ref)
    assert not any(seen.file for seen in hub.log)


def test_a_disk_too_full_for_another_commit_keeps_the_old_one(
    hubs: Hubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, _ = publish(hubs, "hf", SMALL)
    fetch(ref, to=tmp_path)
    publish(hubs, "hf", {**SMALL, WEIGHTS: safetensors(2 * SIZE)})
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(HubError, match="of free space"):
        fetch(ref, to=tmp_path)
    assert stored(tmp_path) == SMALL
    assert resolve(str(tmp_path)) == tmp_path


def test_a_full_disk_on_the_way(hubs: Hubs, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hubs, "hf", SMALL)
    publish(hubs, "ms", SMALL)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HubError, match=r"No space left on device.*choose another one with --to"):
        resolve("org/name")
    assert hubs.ms.log == [], "no other hub can help"


def _no_socket(*_: Any) -> None:
    raise AssertionError("a socket was opened")
