"""Models in the caches of the hubs' own clients: used in place, verified once, never written to; or told why not."""

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import git_sha1
from hub_model import MODEL, SHARDS, SMALL, TAKEN, WEIGHTS, Hubs, link_snapshot, publish, stored

from rapid_infer.errors import HubError
from rapid_infer.hub import fetch, resolve, verified

NEEDED = {name: data for name, data in MODEL.items() if name in TAKEN and name not in ("LICENSE", "README.md")}
INDEXED = {
    **{name: data for name, data in NEEDED.items() if name not in SHARDS},
    "a.safetensors": MODEL[SHARDS[0]],
    "b.safetensors": MODEL[SHARDS[1]],
    "model.safetensors.index.json": b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}',
}


@pytest.fixture
def cache(hubs: Hubs, tmp_path: Path) -> Path:
    return tmp_path / "hf-home" / "hub"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose files were read, one entry each time."""
    seen: list[Path] = []
    compare = verified.compare

    def counted(directory: Path, *args: Any) -> Any:
        seen.append(directory)
        return compare(directory, *args)

    monkeypatch.setattr(verified, "compare", counted)
    return seen


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def connect(_: socket.socket, address: Any) -> None:
        raise AssertionError(f"a socket was opened to {address}")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        yield


def snapshot_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, with sizes and times: equal exactly when nothing was written."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in paths}


def test_what_huggingface_has_is_used_in_place(
    hubs: Hubs, cache: Path, tmp_path: Path, reads: list[Path], no_network: None
) -> None:
    snapshot = link_snapshot(cache, NEEDED)
    before = snapshot_of(cache)
    for ref in ("org/name", "hf:org/name", f"hf:org/name@{snapshot.name}", "https://huggingface.co/org/name"):
        assert resolve(ref) == snapshot
    assert resolve("org/name", offline=True) == snapshot
    done = fetch("org/name", offline=True)
    assert (done.directory, done.commit, done.fetched) == (snapshot, snapshot.name, ())
    assert reads == [snapshot], "later starts do not read it again"
    assert snapshot_of(cache) == before
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("how", ["all", "what loading needs"])
def test_what_its_real_client_downloads(hubs: Hubs, cache: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    from huggingface_hub import snapshot_download

    publish(hubs, "hf")
    patterns = None if how == "all" else list(NEEDED)
    made = snapshot_download("org/name", endpoint=hubs.hf.url, cache_dir=cache, allow_patterns=patterns)
    hubs.hf.log.clear()
    before = snapshot_of(cache)
    assert resolve("org/name") == Path(made)
    assert hubs.hf.log == []
    (cache / "models--org--name" / "trees" / f"{Path(made).name}.json").unlink(missing_ok=True)
    assert resolve("org/name") == Path(made), "what was verified is known by its files"
    assert snapshot_of(cache / "models--org--name" / "blobs") == {
        path: seen for path, seen in before.items() if "/blobs" in path
    }


@pytest.mark.parametrize(
    ("variable", "value", "where"),
    [
        ("HF_HOME", "{}/a", "a/hub"),
        ("HF_HUB_CACHE", "{}/b", "b"),
        ("HF_HUB_CACHE", "~/b", "b"),
        ("HF_HUB_CACHE", "$HOME/b", "b"),
        ("HUGGINGFACE_HUB_CACHE", "{}/c", "c"),
        ("XDG_CACHE_HOME", "{}/d", "d/huggingface/hub"),
        ("HF_HUB_CACHE", "", ".cache/huggingface/hub"),
    ],
)
def test_its_variables_are_heeded(
    hubs: Hubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, where: str
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, value.format(tmp_path))
    snapshot = link_snapshot(tmp_path / where, NEEDED)
    assert resolve("org/name", offline=True) == snapshot


@pytest.mark.parametrize("revision", ["v2", "refs/pr/3"])
def test_a_revision_is_looked_up(cache: Path, revision: str) -> None:
    main = link_snapshot(cache, NEEDED)
    other = link_snapshot(cache, {**NEEDED, "config.json": b"[]"}, revision)
    assert resolve(f"hf:org/name@{revision}", offline=True) == other
    assert resolve(f"hf:org/name@{other.name}", offline=True) == other
    assert resolve("hf:org/name", offline=True) == main
    with pytest.raises(HubError, match="it is not in the cache"):
        resolve("hf:org/name@v3", offline=True)


def _listed(snapshot: Path) -> None:
    """As a client that fetched a part of a snapshot leaves it."""
    files = {name: {"size": len(data), "blob_id": git_sha1(data)} for name, data in NEEDED.items()}
    files["vocab.json"] = files["config.json"]
    (snapshot.parents[1] / "trees").mkdir()
    listing = snapshot.parents[1] / "trees" / f"{snapshot.name}.json"
    listing.write_text(json.dumps({"format_version": 1, "files": files}))


def _flip(snapshot: Path) -> None:
    blob = (snapshot / WEIGHTS).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")


def _copy(snapshot: Path) -> None:
    data = (snapshot / WEIGHTS).read_bytes()
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).write_bytes(data)


def _rename(snapshot: Path) -> None:
    (snapshot / WEIGHTS).resolve().rename(snapshot.parents[1] / "blobs" / "etag-1")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(snapshot.parents[1] / "blobs" / "etag-1")


def _interrupt(snapshot: Path) -> None:
    (snapshot.parents[1] / "blobs" / f"{'ab' * 32}.1f.incomplete").write_bytes(b"x")


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard": (lambda made: (made / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing"),
    "a blob": (lambda made: (made / SHARDS[1]).resolve().unlink(), f"{SHARDS[1]} is missing"),
    "configuration": (lambda made: (made / "config.json").unlink(), "config.json is missing"),
    "tokenizer": (lambda made: (made / "tokenizer.json").unlink(), "a tokenizer is missing"),
    "weights": (lambda made: [(made / name).unlink() for name in SHARDS], "it holds no weights"),
    "a byte": (_flip, f"{WEIGHTS} differs from its digest"),
    "a link": (_copy, f"{WEIGHTS}: no link to a blob"),
    "a digest": (_rename, f"{WEIGHTS}: no link to a blob"),
    "the end": (_interrupt, "the download of blob abababababab was not finished"),
    "what the hub lists": (_listed, "vocab.json is missing"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_what_lacks_something_is_told_and_downloaded(
    hubs: Hubs, cache: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    spoil, reason = SPOILT[kind]
    snapshot = link_snapshot(cache, NEEDED)
    spoil(snapshot)
    before = snapshot_of(cache)
    with pytest.raises(HubError, match=f"offline, .*{snapshot}: .*{reason}.*; run `rapid-infer download") as caught:
        resolve("org/name", offline=True)
    assert "\n" not in str(caught.value)
    publish(hubs, "hf", NEEDED)
    with caplog.at_level(logging.INFO, "rapid_infer"):
        made = resolve("org/name")
    assert stored(made) == NEEDED
    assert snapshot_of(cache) == before
    told = any(f"not used: {snapshot}: " in line and reason in line for line in caplog.messages)
    # Where only the cache's own word was missing, the hub's listing has it.
    assert (made == snapshot) == (not told) == (kind in ("a link", "a digest", "the end", "what the hub lists"))


def test_shards_are_those_of_the_index(cache: Path) -> None:
    snapshot = link_snapshot(cache, INDEXED)
    assert resolve("org/name", offline=True) == snapshot
    (snapshot / "b.safetensors").unlink()
    with pytest.raises(HubError, match=r"b\.safetensors is missing"):
        resolve("org/name", offline=True)


@pytest.mark.parametrize("broken", [b"{}", b"[]", b"", b'{"weight_map": 3}'])
def test_an_index_that_is_none(cache: Path, broken: bytes) -> None:
    link_snapshot(cache, {**INDEXED, "model.safetensors.index.json": broken})
    with pytest.raises(HubError, match=r"model\.safetensors\.index\.json cannot be read"):
        resolve("org/name", offline=True)


@pytest.mark.parametrize("restored", [False, True])
def test_what_changes_after_it_was_verified_is_read_again(cache: Path, reads: list[Path], restored: bool) -> None:
    snapshot = link_snapshot(cache, NEEDED)
    resolve("org/name", offline=True)
    blob = (snapshot / WEIGHTS).resolve()
    blob.write_bytes(MODEL[WEIGHTS] if restored else MODEL[WEIGHTS][:-1] + b"!")
    os.utime(blob, (1, 1))
    if restored:
        assert resolve("org/name", offline=True) == resolve("org/name", offline=True) == snapshot
    else:
        with pytest.raises(HubError, match=f"{WEIGHTS} differs from its digest"):
            resolve("org/name", offline=True)
    assert len(reads) == 2


def test_what_was_verified_in_one_cache_says_nothing_of_another(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = link_snapshot(cache, NEEDED)
    resolve("org/name", offline=True)
    other = link_snapshot(tmp_path / "other", NEEDED)
    _flip(other)
    for name in NEEDED:
        time = (snapshot / name).stat().st_mtime_ns
        os.utime(other / name, ns=(time, time))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    with pytest.raises(HubError, match=f"{WEIGHTS} differs from its digest"):
        resolve("org/name", offline=True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"directory": 1, "times": []}'])
def test_a_note_that_is_none_is_made_again(cache: Path, tmp_path: Path, reads: list[Path], text: str) -> None:
    snapshot = link_snapshot(cache, NEEDED)
    resolve("org/name", offline=True)
    (note,) = (tmp_path / "cache").rglob("verified/*.json")
    note.write_text(text)
    assert resolve("org/name", offline=True) == resolve("org/name", offline=True) == snapshot
    assert len(reads) == 2


def test_it_works_without_a_cache_of_our_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAPID_INFER_CACHE", str(tmp_path / "file" / "cache"))
    snapshot = link_snapshot(cache, NEEDED)
    assert resolve("org/name") == snapshot
    assert "verified again at the next start" in caplog.text


def test_the_download_command_asks_the_hub_and_uses_it(hubs: Hubs, cache: Path) -> None:
    publish(hubs, "hf", NEEDED)
    snapshot = link_snapshot(cache, NEEDED)
    snapshot = snapshot.rename(snapshot.with_name(hubs.hf.commit("org/name")))
    for dry_run in (True, False):
        done = fetch("org/name", dry_run=dry_run)
        assert (done.directory, done.fetched) == (snapshot, ())
    assert resolve("org/name") == snapshot, "though the client's own ref means another commit"
    assert hubs.hf.gets(WEIGHTS) == 0
    publish(hubs, "hf", {**NEEDED, "config.json": b"[]"})
    newer = fetch("org/name").directory
    assert stored(newer) == {**NEEDED, "config.json": b"[]"}
    assert resolve("org/name") == newer


def test_a_directory_of_ones_own_gets_its_own_files(hubs: Hubs, cache: Path, tmp_path: Path) -> None:
    publish(hubs, "hf", NEEDED)
    link_snapshot(cache, NEEDED)
    assert stored(fetch("org/name", to=tmp_path / "m").directory) == NEEDED


def test_the_folder_of_the_client_is_no_model(cache: Path) -> None:
    snapshot = link_snapshot(cache, NEEDED)
    with pytest.raises(HubError, match=f"a hub's client keeps org/name; .*write org/name, or give one of {snapshot}"):
        resolve(str(snapshot.parents[1]))
    assert resolve(str(snapshot)) == snapshot


# ModelScope


LAYOUTS = (
    *("models/org--na.me/snapshots/master", "models/org/na___me", "hub/models/org/na___me"),
    *("org/na___me", "hub/org/na___me", "hub/org/na.me"),
)


def _modelscope(hubs: Hubs, tmp_path: Path, layout: str, files: dict[str, bytes]) -> Path:
    hubs.ms.repos["org/na.me"]["master"] = dict(NEEDED)
    for name, data in files.items():
        path = tmp_path / "ms-cache" / layout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "ms-cache" / layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_modelscope_has_is_used_once_compared(
    hubs: Hubs, tmp_path: Path, caplog: pytest.LogCaptureFixture, reads: list[Path], layout: str
) -> None:
    made = _modelscope(hubs, tmp_path, layout, NEEDED)
    before = snapshot_of(tmp_path / "ms-cache")
    with pytest.raises(HubError, match=f"{made}: ModelScope's cache keeps no digests, .*download ms:org/na.me"):
        resolve("ms:org/na.me", offline=True)
    with caplog.at_level(logging.INFO, "rapid_infer"):
        assert resolve("ms:org/na.me") == made
    assert "not used" not in caplog.text
    assert not any(seen.file for seen in hubs.ms.log), "nothing but the listing was asked for"
    hubs.ms.close()
    assert resolve("ms:org/na.me") == resolve("org/na.me", offline=True) == made
    assert reads == [made]
    assert snapshot_of(tmp_path / "ms-cache") == before
    (made / WEIGHTS).write_bytes(MODEL[SHARDS[1]])
    with pytest.raises(HubError, match=f"{WEIGHTS} differs from its digest"):
        resolve("ms:org/na.me", offline=True)


def test_what_modelscope_has_half_is_told_and_downloaded(
    hubs: Hubs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = _modelscope(hubs, tmp_path, LAYOUTS[0], {**NEEDED, WEIGHTS: b"cut off"})
    with caplog.at_level(logging.INFO, "rapid_infer"):
        assert stored(resolve("ms:org/na.me")) == NEEDED
    assert f"not used: {made}: {WEIGHTS} has 7 bytes where 300000 are expected" in caplog.text


def test_what_modelscope_has_is_told_when_the_other_hub_comes_first(
    hubs: Hubs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = _modelscope(hubs, tmp_path, LAYOUTS[0], NEEDED)
    hubs.hf.repos["org/na.me"]["main"] = dict(NEEDED)
    with caplog.at_level(logging.INFO, "rapid_infer"):
        assert "huggingface" in resolve("org/na.me").parts
    assert f"not used: {made}: ModelScope's cache keeps no digests" in caplog.text


def test_what_modelscopes_real_client_downloads(hubs: Hubs, tmp_path: Path) -> None:
    from modelscope_hub import HubApi
    from modelscope_hub.config import HubConfig

    hubs.ms.repos["org/na.me"]["master"] = dict(SMALL)
    client = HubApi(HubConfig(endpoint=hubs.ms.url, cache_dir=tmp_path / "ms-cache"))
    made = Path(client.download_repo("org/na.me", "model"))
    asked = sum(bool(seen.file) for seen in hubs.ms.log)
    assert resolve("ms:org/na.me") == made
    assert sum(bool(seen.file) for seen in hubs.ms.log) == asked
