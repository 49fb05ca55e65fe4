"""Does a hub answer? One request to its front page, without a token and without a retry."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rapid_infer.hub.choose import ORDER, PUBLIC, Endpoints, open_source, within
from rapid_infer.hub.http import new_session
from rapid_infer.hub.source import Source, SourceError, explain

SECONDS = 4.0
"""For one hub, the look-up of its name included, which has no deadline of its own."""


@dataclass(frozen=True, slots=True)
class Reachability:
    """`said`: the status it answered with, or why there was no answer; `seconds` until then."""

    name: str
    endpoint: str
    reachable: bool
    said: str
    seconds: float


def reachability(endpoints: Endpoints = PUBLIC, seconds: float = SECONDS) -> Iterator[Reachability]:
    """Of every hub, at the mirrors that the environment names; all are asked at once, each for at most `seconds`."""
    sources = [open_source(name, endpoints) for name in ORDER]
    with ThreadPoolExecutor(len(sources)) as pool:
        yield from pool.map(lambda source: _ask(source, seconds), sources)


def _ask(source: Source, seconds: float) -> Reachability:
    start = time.monotonic()
    try:
        status = within(seconds, lambda: _status(source.endpoint, seconds), source.title)
    except SourceError as error:
        fine, said = False, str(error).partition(": ")[2]
    except Exception as error:
        fine, said = False, explain(error)
    else:
        fine, said = status < 500, f"HTTP {status}"
    return Reachability(source.name, source.endpoint, fine, said, time.monotonic() - start)


def _status(endpoint: str, seconds: float) -> int:
    with new_session() as session:
        # A hub's page may send browsers elsewhere, to log in say: that it answers is enough.
        return session.head(endpoint, allow_redirects=False, timeout=seconds).status_code
