"""One HTTP exchange over ASGI: a body with a limit, an answer whole or in events, and a client that may go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from rapid_infer.server.errors import ApiError, invalid, of_decode_error

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

JSON = "application/json"

_BODY_TIMEOUT = 60.0


class ClientGone(Exception):
    """The client has closed the connection, or has read nothing for too long."""


class Exchange:
    """A request and its answer. `started`: the answer's head is out. `stuck_since`: when a write began to wait."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id = request_id
        self.began = time.perf_counter()
        self.status = 0
        self.started = False
        self.gone = False
        self.stuck_since: float | None = None
        self.task = asyncio.current_task()
        self.notes: dict[str, Any] = {}
        self._scope, self._receive, self._send = scope, receive, send
        self._watcher: asyncio.Task[None] | None = None

    @cached_property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self._scope["headers"])

    async def body(self, limit: int) -> bytes:
        """ApiError 413 beyond `limit` bytes, as soon as that is known."""
        try:
            length = int(self.headers.get(b"content-length", b"0"))
        except ValueError:
            raise invalid("content-length", "the Content-Length header is not a number") from None
        too_large = ApiError(
            413, f"the body has more than {limit} bytes; send less, or raise --max-body-mb", param="body"
        )
        if length > limit:
            raise too_large
        try:
            async with asyncio.timeout(_BODY_TIMEOUT):
                return await self._read(limit, too_large)
        except TimeoutError:
            raise ApiError(408, f"the body has not come within {_BODY_TIMEOUT:.0f} s", param="body") from None

    async def _read(self, limit: int, too_large: ApiError) -> bytes:
        pieces, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGone
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise too_large
            pieces.append(piece)
            if not message.get("more_body"):
                return b"".join(pieces)

    async def json(self, kind: type[T], limit: int) -> T:
        """The body as a `kind`; ApiError that names the field which is wrong."""
        return self.decode(await self.body(limit), kind)

    @staticmethod
    def decode(data: bytes, kind: type[T]) -> T:
        """As `json`, of a body that has been read."""
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise of_decode_error(error) from None

    def watch(self) -> None:
        """From now on, the running task is cancelled when the client goes away. The body must have been read."""
        self._watcher = asyncio.create_task(self._wait_gone())

    async def _wait_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        """End the exchange as for a client that went away."""
        if not self.gone and self.task is not None:
            self.gone = True
            self.task.cancel()

    def close(self) -> None:
        self.task = None
        if self._watcher is not None:
            self._watcher.cancel()

    async def respond(
        self, status: int, body: bytes, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        await self._start(status, content_type, [("content-length", str(len(body))), *headers])
        await self._out({"type": "http.response.body", "body": body})

    async def respond_json(self, value: Any, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        await self.respond(status, msgspec.json.encode(value), JSON, headers)

    async def write(self, data: bytes) -> None:
        """Server-sent events; the first call begins the answer. Waits while the client does not read."""
        await self._begin_events()
        await self._out({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """The last events."""
        await self._begin_events()
        await self._out({"type": "http.response.body", "body": data})

    async def _begin_events(self) -> None:
        if not self.started:
            fields = [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
            await self._start(200, "text/event-stream; charset=utf-8", fields)

    async def _start(self, status: int, content_type: str, headers: Iterable[tuple[str, str]]) -> None:
        self.status, self.started = status, True
        fields = [("content-type", content_type), ("x-request-id", self.request_id), *headers]
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _out(self, message: MutableMapping[str, Any]) -> None:
        self.stuck_since = time.monotonic()
        await self._send(message)
        self.stuck_since = None
