"""Offline means no socket; tokens go to their own hub and into no log."""

import io
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import Fault
from hub_model import SMALL, WEIGHTS, Hubs, publish

from rapid_infer.errors import HubError
from rapid_infer.hub import fetch, fill, http, resolve, verify

TOKENS = {"HF_TOKEN": "hf_secretsecretsecret", "MODELSCOPE_API_TOKEN": "ms-secretsecretsecret"}
BOTH = pytest.mark.parametrize("place", ["hf", "ms"])
PLACES = pytest.mark.parametrize("place", ["hf", "ms", "auto"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "DEFAULT_POLICY", http.Policy(attempts=2, first_delay=0.01, read_timeout=1))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Nothing may connect; what tried to is recorded, should somebody catch the error."""
    tried: list[Any] = []

    def connect(_: socket.socket, address: Any) -> None:
        tried.append(address)
        raise AssertionError(f"a socket was opened to {address}")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        patch.setattr(socket, "getaddrinfo", lambda *args: connect(None, args))  # type: ignore[arg-type]
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield tried
    assert tried == []


def _ref(place: str) -> str:
    return "org/name" if place == "auto" else f"{place}:org/name"


def _before(hubs: Hubs, place: str, *, broken: bool = False) -> Path | None:
    """An earlier, online download."""
    ref, hub = publish(hubs, "hf" if place == "auto" else place, SMALL)
    if not broken:
        return resolve(ref)
    hub.faults[WEIGHTS] = [Fault("404", times=None)]
    with pytest.raises(HubError):
        resolve(ref)
    return None


@pytest.fixture(params=["hf", "ms", "auto"])
def full(hubs: Hubs, request: pytest.FixtureRequest) -> tuple[str, Path | None]:
    return _ref(request.param), _before(hubs, request.param)


@pytest.fixture(params=["hf", "ms", "auto"])
def partial(hubs: Hubs, request: pytest.FixtureRequest) -> str:
    _before(hubs, request.param, broken=True)
    return _ref(request.param)


def test_offline_with_everything(full: tuple[str, Path | None], no_network: list[Any]) -> None:
    ref, made = full
    assert resolve(ref) == made
    assert fetch(ref).directory == made
    assert made is not None
    assert verify(made).ok


def test_offline_with_a_part(partial: str, no_network: list[Any]) -> None:
    for action in (resolve, fetch):
        with pytest.raises(HubError, match=rf"offline, .*{WEIGHTS} is missing; run `rapid-infer download"):
            action(partial)


@PLACES
def test_offline_with_nothing(hubs: Hubs, tmp_path: Path, no_network: list[Any], place: str) -> None:
    for options in ({}, {"revision": "v2"}):
        with pytest.raises(HubError, match=r"offline, .*it is not in the cache; run `rapid-infer download"):
            resolve(_ref(place), **options)
    with pytest.raises(HubError, match="has no lock file"):
        fetch(_ref(place), to=tmp_path)
    with pytest.raises(HubError, match="forbids the network"):
        verify(tmp_path, against="hf:org/name")


def test_offline_by_argument(hubs: Hubs) -> None:
    ref, hub = publish(hubs, "hf", SMALL)
    with pytest.raises(HubError, match="it is not in the cache"):
        resolve(ref, offline=True)
    with pytest.raises(HubError, match="it is not in the cache"):
        fetch(ref, offline=True)
    assert hub.log == []


@BOTH
def test_tokens_stay_at_home(
    hubs: Hubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    """Not in a log of any level, not in an error, not at a redirect's host, not from ~/.netrc."""
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password netrc-secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    log, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(log), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        ref, hub = publish(hubs, place, SMALL)
        hub.cdn = hubs.cdn  # type: ignore[attr-defined]
        hubs.cdn.faults[WEIGHTS] = [Fault("500")]
        fetch(ref, to=tmp_path / "m")
        hubs.cdn.faults[WEIGHTS] = [Fault("flip", times=None)]
        with pytest.raises(HubError) as caught:
            fetch(ref, to=tmp_path / "n")
        hub.repos.clear()
        with pytest.raises(HubError) as refused:
            fetch(ref, to=tmp_path / "o")
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    token = TOKENS["HF_TOKEN" if place == "hf" else "MODELSCOPE_API_TOKEN"]
    asked = [seen for seen in hub.log if "/resolve/" in seen.path or "FilePath=" in seen.path]
    assert len(asked) > 4
    assert {seen.headers["authorization"] for seen in asked} == {f"Bearer {token}"}
    assert len(hubs.cdn.log) > 4
    for seen in hubs.cdn.log:
        assert not {"authorization", "cookie"} & seen.headers.keys()
        assert "secret" not in str(seen.headers)
    said = log.getvalue() + "".join(capfd.readouterr()) + str(caught.value) + str(refused.value)
    assert "urllib3" in said or "GET" in said, "the libraries did log"
    for secret in (*TOKENS.values(), "netrc-secret"):
        assert secret not in said
    assert not any(token in path.read_text() for path in tmp_path.rglob("*.json"))
