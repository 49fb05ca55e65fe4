"""Everything that can go wrong with the bytes of a file, once and for ever, on both hubs and behind a redirect."""

import io
import re
from pathlib import Path

import pytest
from fake_hub import Fault
from hub_model import PLACES, SIZE, WEIGHTS, Hubs, publish, safetensors
from hub_model import SMALL as MODEL

from rapid_infer.errors import HubError
from rapid_infer.hub import fetch, fill, http
from rapid_infer.hub.entry import checked_entry

QUICK = http.Policy(attempts=3, first_delay=0.01, read_timeout=0.3, connect_timeout=1, slow_time=0.3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "DEFAULT_POLICY", QUICK)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()}


CUT = Fault("truncate", at=100_000)
ONCE = {
    "truncated": ([CUT], 2),
    "flipped": ([Fault("flip")], 2),
    "zero bytes": ([Fault("empty")], 2),
    "416": ([Fault("416")], 2),
    "416 to a part": ([CUT, Fault("416")], 3),
    "416 to every range": ([CUT, Fault("no-ranges", times=None)], 3),
    "range ignored": ([CUT, Fault("ignore-range")], 2),
    "range answered with 200": ([CUT, Fault("range-as-200")], 2),
    "another range": ([CUT, Fault("other-range")], 3),
    "flipped behind a part": ([CUT, Fault("flip")], 3),
    "429": ([Fault("429")], 2),
    "429 with Retry-After": ([Fault("429", headers={"Retry-After": "0"})], 2),
    "500": ([Fault("500")], 2),
    "503 twice": ([Fault("503", times=2)], 3),
    "stalled": ([Fault("stall", at=70_000)], 2),
    "trickling": ([Fault("trickle")], 2),
    "too short": ([Fault("short")], 2),
    "too long": ([Fault("long")], 2),
    "too long without length": ([Fault("endless")], 2),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ONCE)
def test_a_fault_that_passes(hubs: Hubs, tmp_path: Path, place: str, name: str) -> None:
    ref, server = publish(hubs, place, MODEL)
    faults, gets = ONCE[name]
    server.faults[WEIGHTS] = [Fault(fault.kind, fault.at, fault.times, fault.headers) for fault in faults]
    fetch(ref, to=tmp_path / "model")
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == MODEL[WEIGHTS]
    assert server.gets(WEIGHTS) == gets
    assert not list(tmp_path.rglob("*.part"))


FOR_EVER = {
    "truncate": (r"ended after 1000 of|broke off", 3),
    "flip": (r"got sha256 [0-9a-f]{64} where [0-9a-f]{64} is expected, 3 times", 3),
    "empty": ("announced 0 bytes where 300000 are expected", 3),
    "416": ("HTTP 416", 3),
    "429": ("HTTP 429", 3),
    "500": ("HTTP 500", 3),
    "stall": ("no data from .* in time", 3),
    "trickle": ("sends almost nothing", 3),
    "short": ("announced 1000 bytes where 300000 are expected", 3),
    "long": ("announced 300004 bytes", 3),
    "endless": ("sent more than the 300000 bytes", 3),
}


BEHIND_A_REDIRECT = ("truncate", "flip", "500")


@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, place) for kind in FOR_EVER for place in PLACES if place != "cdn" or kind in BEHIND_A_REDIRECT],
)
def test_a_fault_that_stays(hubs: Hubs, tmp_path: Path, kind: str, place: str) -> None:
    ref, server = publish(hubs, place, MODEL)
    # The stall lets nothing new through in later attempts.
    server.faults[WEIGHTS] = [Fault(kind, at=0 if kind == "stall" else 1000, times=None)]
    message, gets = FOR_EVER[kind]
    with pytest.raises(HubError, match=message) as caught:
        fetch(ref, to=tmp_path / "model")
    assert WEIGHTS in str(caught.value)
    assert "signed-secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model" / WEIGHTS).exists(), "nothing under the final name"
    assert server.gets(WEIGHTS) == gets
    server.faults.clear()
    assert WEIGHTS in fetch(ref, to=tmp_path / "model").fetched, "the next run mends it"
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == MODEL[WEIGHTS]


def test_a_wrong_digest_names_both_and_leaves_nothing(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "hf", MODEL)
    hub.faults["config.json"] = [Fault("flip", times=None)]
    with pytest.raises(HubError, match=r"config.json: got git-sha1 [0-9a-f]{40} where [0-9a-f]{40} is expected"):
        fetch(ref, to=tmp_path / "model")
    assert not [name for name in names(tmp_path) if name.startswith("config.json")]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_not_repeated(hubs: Hubs, tmp_path: Path, status: int) -> None:
    ref, hub = publish(hubs, "hf", MODEL)
    hub.faults[WEIGHTS] = [Fault(str(status), times=None)]
    with pytest.raises(HubError, match=f"HTTP {status} from"):
        fetch(ref, to=tmp_path / "model")
    assert hub.gets(WEIGHTS) == 1


def test_a_signed_address_that_ran_out_is_asked_for_again(hubs: Hubs, tmp_path: Path) -> None:
    ref, cdn = publish(hubs, "cdn", MODEL)
    cdn.faults[WEIGHTS] = [Fault("403")]
    fetch(ref, to=tmp_path / "model")
    used = [seen.path for seen in cdn.log if seen.file == WEIGHTS]
    assert len(set(used)) == 2


@pytest.mark.parametrize("place", PLACES)
def test_cut_again_and_again_it_still_ends(hubs: Hubs, tmp_path: Path, place: str) -> None:
    ref, server = publish(hubs, place, MODEL)
    server.faults[WEIGHTS] = [Fault("truncate", at=70_000, times=None)]
    fetch(ref, to=tmp_path / "model")
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == MODEL[WEIGHTS]
    assert server.gets(WEIGHTS) == 5
    assert server.sent(WEIGHTS) == SIZE, "no byte came twice"


def test_a_trickle_is_no_progress(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "ms", MODEL)
    hub.faults[WEIGHTS] = [Fault("truncate", at=10, times=None)]
    with pytest.raises(HubError, match=r"given up after 3 attempts without progress at 30 of 300000 bytes.*resume"):
        fetch(ref, to=tmp_path / "model")


def test_a_part_of_another_version_is_not_used(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "hf", MODEL)
    hub.faults[WEIGHTS] = [CUT, Fault("500", times=None)]
    with pytest.raises(HubError):
        fetch(ref, to=tmp_path / "model")
    (part,) = (tmp_path / "model").glob(f"{WEIGHTS}.*.part")
    assert part.stat().st_size == 100_000
    hub.faults.clear()
    new = safetensors(SIZE)
    publish(hubs, "hf", {**MODEL, WEIGHTS: new})
    before = hub.sent(WEIGHTS)
    fetch(ref, to=tmp_path / "model")
    assert hub.sent(WEIGHTS) - before == SIZE
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == new
    assert not part.exists()


def test_damaged_part_is_found_out(hubs: Hubs, tmp_path: Path) -> None:
    ref, hub = publish(hubs, "hf", MODEL)
    hub.faults[WEIGHTS] = [Fault("truncate", at=100_000), Fault("500", times=None)]
    with pytest.raises(HubError):
        fetch(ref, to=tmp_path / "model")
    (part,) = (tmp_path / "model").glob(f"{WEIGHTS}.*.part")
    part.write_bytes(b"\0" * 100_000)
    hub.faults.clear()
    fetch(ref, to=tmp_path / "model")
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == MODEL[WEIGHTS]


class _Redirecting:
    """A session whose every answer leads to `location`."""

    def __init__(self, location: str) -> None:
        self._location = location

    def get(self, url: str, **_: object) -> object:
        import requests

        response = requests.Response()
        response.status_code, response.url, response.raw = 302, url, io.BytesIO()
        response.headers["Location"] = self._location
        return response


@pytest.mark.parametrize(
    ("location", "error"),
    [
        ("http://cdn.example/x", "redirects from https to http"),
        ("file:///etc/passwd", "redirects from https to file"),
        ("/again", "more than 5 redirects"),
    ],
)
def test_bad_redirects(location: str, error: str) -> None:
    session = _Redirecting(location)
    with (
        pytest.raises((http.Refused, http.Fault), match=error),
        http.ranged_get(session, "https://hub.example/x", {}, 0, 5, QUICK),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "", "a\\b", "c:evil", "a\0b"])
def test_names_that_leave_the_directory_are_refused(path: str) -> None:
    with pytest.raises(HubError, match="refused"):
        checked_entry(path, 1, "sha256", "0" * 64, "")


@pytest.mark.parametrize("place", ["hf", "ms"])
def test_a_listing_that_leaves_the_directory(hubs: Hubs, tmp_path: Path, place: str) -> None:
    ref, _ = publish(hubs, place, {**MODEL, "../../evil.json": b"evil"})
    with pytest.raises(HubError, match=re.escape("file name '../../evil.json'")):
        fetch(ref, to=tmp_path / "a" / "b" / "model")
    assert "evil.json" not in names(tmp_path)


@pytest.mark.parametrize(("size", "digest"), [(None, "0" * 64), (-1, "0" * 64), (1, ""), (1, "0" * 40), (1, None)])
def test_a_file_without_size_or_digest_is_refused(size: int | None, digest: str | None) -> None:
    with pytest.raises(HubError, match=r"f\.bin.*from the hub; expected"):
        checked_entry("f.bin", size, "sha256", digest, "")
