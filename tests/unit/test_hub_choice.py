"""Which hub is asked, which is left alone, and when the next one gets its turn."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import API, Fault
from hub_model import SMALL, WEIGHTS, Hubs, publish, stored

from rapid_infer.errors import HubError
from rapid_infer.hub import Endpoints, choose, fetch, fill, http, resolve


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "DEFAULT_POLICY", http.Policy(attempts=2, first_delay=0.01, read_timeout=1))


def test_auto_takes_the_first_and_says_so(hubs: Hubs, caplog: pytest.LogCaptureFixture) -> None:
    publish(hubs, "hf", SMALL)
    publish(hubs, "ms", SMALL)
    with caplog.at_level(logging.INFO, "rapid_infer"):
        assert "huggingface" in resolve("org/name").parts
    assert f"org/name from Hugging Face ({hubs.hf.url}): the first in order" in caplog.text
    assert hubs.ms.log == []


@pytest.mark.parametrize("how", ["variable", "option", "prefix", "order"])
def test_modelscope_is_chosen(hubs: Hubs, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    publish(hubs, "hf", SMALL)
    publish(hubs, "ms", SMALL)
    if how in ("variable", "order"):
        monkeypatch.setenv("RAPID_INFER_HUB", "modelscope" if how == "variable" else "modelscope,huggingface")
    ref = "ms:org/name" if how == "prefix" else "org/name"
    made = resolve(ref, hub="modelscope") if how == "option" else resolve(ref)
    assert "modelscope" in made.parts
    assert hubs.hf.log == []


@pytest.mark.parametrize(("place", "other"), [("hf", "ms"), ("ms", "hf")])
@pytest.mark.parametrize("fails", [False, True])
def test_an_explicit_source_contacts_that_host_alone(hubs: Hubs, place: str, other: str, fails: bool) -> None:
    publish(hubs, other)
    ref, hub = publish(hubs, place)
    if fails:
        hub.faults[WEIGHTS] = [Fault("flip", times=None)]
        with pytest.raises(HubError, match="try another hub"):
            resolve(ref)
    else:
        resolve(ref)
    assert getattr(hubs, other).log == hubs.cdn.log == []


@pytest.mark.parametrize("place", ["hf", "ms"])
def test_an_endpoint_option_wins_over_the_variable(
    hubs: Hubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    ref, hub = publish(hubs, place, SMALL)
    monkeypatch.setenv("HF_ENDPOINT" if place == "hf" else "MODELSCOPE_ENDPOINT", hubs.cdn.url)
    mirror = Endpoints(huggingface=hub.url) if place == "hf" else Endpoints(modelscope=hub.url)
    assert fetch(ref, to=tmp_path / "m", endpoints=mirror).endpoint == hub.url
    assert hubs.cdn.log == []


def test_modelscopes_older_variable_names_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "www.modelscope.ai")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "")
    assert choose.open_source("modelscope", Endpoints()).endpoint == "https://www.modelscope.ai"
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "https://mirror.example/")
    assert choose.open_source("modelscope", Endpoints()).endpoint == "https://mirror.example"


def _refuse(hubs: Hubs) -> None:
    hubs.hf.close()


def _stall(hubs: Hubs) -> None:
    hubs.hf.faults[API] = [Fault("stall", times=None)]


def _fail(hubs: Hubs) -> None:
    hubs.hf.faults[API] = [Fault("503", times=None)]


def _lack(hubs: Hubs) -> None:
    hubs.hf.repos.clear()


def _spoil(hubs: Hubs) -> None:
    hubs.hf.faults[WEIGHTS] = [Fault("flip", times=None)]


@pytest.mark.parametrize("trouble", [_refuse, _stall, _fail, _lack, _spoil])
def test_fall_back(
    hubs: Hubs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[Hubs], None],
) -> None:
    publish(hubs, "hf", SMALL)
    publish(hubs, "ms", SMALL)
    assert choose.FALLBACK_SECONDS < 9
    if trouble is _stall:
        monkeypatch.setattr("rapid_infer.hub.download.FALLBACK_SECONDS", 0.3)
    trouble(hubs)
    with caplog.at_level(logging.INFO, "rapid_infer"):
        done = fetch("org/name", to=tmp_path / "m")
    assert done.source == "modelscope"
    assert stored(done.directory) == SMALL
    assert "trying the next hub" in caplog.text
    assert f"from ModelScope ({hubs.ms.url}): after " in caplog.text
    assert ("no answer within 0 s" in caplog.text) == (trouble is _stall)


def test_when_no_hub_has_it_every_reason_is_given(hubs: Hubs) -> None:
    with pytest.raises(HubError, match=r"Hugging Face \(.*no such model.*; ModelScope \(.*no such model"):
        resolve("org/none")
