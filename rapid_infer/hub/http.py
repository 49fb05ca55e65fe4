"""One ranged GET: redirects without credentials, and every way it can fail as a `Fault`.

Uses `requests`, which modelscope-hub depends on and which honours the proxy and certificate variables of the
environment. Neither official client offers a resumable, hashed read of one URL.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from rapid_infer.hub.entry import CHUNK

if TYPE_CHECKING:
    from requests import Response, Session

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient a transfer is; times in seconds.

    `attempts` counts those in a row that brought no new bytes, `mismatches` whole files with a wrong digest. A
    response that brings almost nothing for `slow_time` is given up.
    """

    attempts: int = 6
    mismatches: int = 3
    first_delay: float = 1.0
    max_delay: float = 30.0
    max_retry_after: float = 120.0
    connect_timeout: float = 10.0
    read_timeout: float = 30.0
    slow_time: float = 60.0


DEFAULT_POLICY = Policy()


class Fault(Exception):
    """An attempt failed and another may succeed. `restart`: not with the bytes that are there; `wait` in seconds."""

    def __init__(self, reason: str, *, restart: bool = False, wait: float | None = None) -> None:
        super().__init__(reason)
        self.restart = restart
        self.wait = wait


class Refused(Exception):
    """The server will not give this file, however often it is asked."""


@dataclass(slots=True)
class Body:
    """A response that is being read: the offset of its first byte in the file, and its raw stream."""

    start: int
    host: str
    response: "Response"

    def chunks(self) -> Iterator[bytes]:
        """The bytes as they come, at most CHUNK at a time. Fault when the connection breaks off or stalls."""
        import urllib3

        raw = self.response.raw
        try:
            while data := raw.read1(CHUNK):
                yield data
        except urllib3.exceptions.ReadTimeoutError as error:
            raise Fault(f"no data from {self.host} in time") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Fault(f"the connection to {self.host} broke off ({type(error).__name__})") from error


def new_session() -> "Session":
    """A connection pool for one thread."""
    import requests

    session = requests.Session()
    # Without this, requests takes passwords for any host, also that of a redirect, out of ~/.netrc.
    session.auth = lambda request: request
    return session


@contextmanager
def ranged_get(
    session: "Session", url: str, own_headers: Mapping[str, str], offset: int, size: int, policy: Policy
) -> Iterator[Body]:
    """Ask for the bytes from `offset` of a file of `size` bytes.

    `own_headers` go to the origin of `url` and to no other. The body may start before `offset`, at 0, when the server
    ignores ranges. Raises Fault, or Refused.
    """
    response = _follow(session, url, own_headers, offset, policy)
    try:
        host = urlsplit(response.url).netloc
        redirected = origin(response.url) != origin(url)
        _check_status(response, host, offset, redirected)
        yield Body(_start(response, host, offset, size), host, response)
    finally:
        response.close()


def origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.rpartition("@")[2]


def _follow(session: "Session", url: str, own: Mapping[str, str], offset: int, policy: Policy) -> "Response":
    import requests

    home, target = origin(url), url
    for _ in range(_MAX_REDIRECTS + 1):
        # Digests and ranges are about the bytes of the file, not about a compressed form of them.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
        if origin(target) == home:
            headers |= own
        try:
            response = session.get(
                target,
                headers=headers,
                stream=True,
                allow_redirects=False,
                timeout=(policy.connect_timeout, policy.read_timeout),
            )
        except requests.RequestException as error:
            # Its text holds the whole URL, which may be signed.
            raise Fault(f"no answer from {urlsplit(target).netloc} ({type(error).__name__})") from error
        location = response.headers.get("Location")
        if response.status_code not in _REDIRECTS or not location:
            return response
        response.close()
        target = urljoin(target, location)
        if urlsplit(target).scheme not in ("https", home[0]):
            raise Refused(f"{home[1]} redirects from {home[0]} to {urlsplit(target).scheme or 'nothing'}")
    raise Fault(f"more than {_MAX_REDIRECTS} redirects from {home[1]}")


def _check_status(response: "Response", host: str, offset: int, redirected: bool) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status == 416:
        raise Fault(f"HTTP 416 from {host} for bytes from {offset}", restart=True)
    # A signed URL that has run out is answered with 403 or 404; the next attempt gets a new one.
    if status in (408, 425, 429) or status >= 500 or redirected:
        raise Fault(f"HTTP {status} from {host}", wait=_retry_after(response))
    hint = {401: "; set a token", 403: "; set a token that may read it"}.get(status, "")
    raise Refused(f"HTTP {status} from {host}{hint}")


def _retry_after(response: "Response") -> float | None:
    text = response.headers.get("Retry-After", "").strip()
    return float(text) if text.isdigit() else None


def _start(response: "Response", host: str, offset: int, size: int) -> int:
    """Where the body begins; Fault when the server speaks of a file of another size, or of another part."""
    if response.headers.get("Content-Encoding", "identity") not in ("", "identity"):
        raise Fault(f"{host} sent compressed bytes")
    ranged = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    # Some servers answer 200 to a range they honour: the header decides, not the status.
    if ranged is None:
        if response.status_code == 206:
            raise Fault(f"{host} sent a part without saying which", restart=True)
        length = response.headers.get("Content-Length")
        if length is not None and length.isdigit() and int(length) != size:
            raise Fault(f"{host} announced {length} bytes where {size} are expected")
        return 0
    start, total = int(ranged[1]), ranged[2]
    if start != offset or total not in ("*", str(size)):
        raise Fault(f"{host} sent bytes from {start} of {total} where {offset} of {size} were asked for", restart=True)
    return start
