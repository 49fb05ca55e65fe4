"""A client of a completion API that costs little itself: raw HTTP/1.1 over asyncio, and a time for each piece read."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Exchange:
    """`arrivals`: the time of each event with text. `error`: why the answer is not whole."""

    status: int = 0
    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None


class Client:
    """`base_url` is with its path, such as http://127.0.0.1:8000/v1. Keeps connections for later requests."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/")
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, path: str) -> Any:
        """JSON. OSError, ValueError."""
        reader, writer = await self._connection()
        writer.write(f"GET {self._path}{path} HTTP/1.1\r\nHost: {self._host}\r\n{self._key}\r\n".encode())
        status, chunked, length = await self._head(reader)
        body = b"".join([piece async for piece in _body(reader, chunked, length)])
        self._idle.append((reader, writer))
        if status != 200:
            raise ValueError(f"{path} answered {status}: {body[:200]!r}")
        return json.loads(body)

    async def stream(self, path: str, body: dict[str, Any]) -> Exchange:
        """Post, and read events to the end; does not raise."""
        data = json.dumps(body).encode()
        done = Exchange()
        try:
            reader, writer = await self._connection()
            head = f"POST {self._path}{path} HTTP/1.1\r\nHost: {self._host}\r\n{self._key}"
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            done.status, chunked, length = await self._head(reader)
            if done.status != 200:
                text = b"".join([piece async for piece in _body(reader, chunked, length)])
                done.error = f"HTTP {done.status}: {text[:200]!r}"
            else:
                await self._events(_body(reader, chunked, length), done)
            self._idle.append((reader, writer))
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            done.error = f"{type(error).__name__}: {error}"
        return done

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
        return await asyncio.open_connection(self._host, self._port, ssl=self._secure or None, limit=2**20)

    @staticmethod
    async def _head(reader: asyncio.StreamReader) -> tuple[int, bool, int]:
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        fields = dict(line.split(b":", 1) for line in lines[1:] if b":" in line)
        chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
        return int(lines[0].split()[1]), chunked, int(fields.get(b"content-length", b"0"))

    @staticmethod
    async def _events(pieces: Any, done: Exchange) -> None:
        rest, ended = b"", False
        async for piece in pieces:
            now = time.perf_counter()
            blocks = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            rest = blocks.pop()
            for block in blocks:
                if not block.startswith(b"data: "):
                    continue
                if block == b"data: [DONE]":
                    ended = True
                elif b'"choices":[]' in block or b'"choices": []' in block:
                    done.usage = json.loads(block[6:]).get("usage")
                elif b'"error"' in block[:20]:
                    done.error = block[6:300].decode(errors="replace")
                else:
                    done.arrivals.append(now)
        if not ended and done.error is None:
            done.error = "the stream ended without [DONE]"


async def _body(reader: asyncio.StreamReader, chunked: bool, length: int) -> Any:
    """Pieces as they come; all chunks that are there at once are one piece."""
    if not chunked:
        while length > 0:
            piece = await reader.read(min(length, 2**16))
            if not piece:
                raise ValueError("the connection was closed in the middle of an answer")
            length -= len(piece)
            yield piece
        return
    buffer = b""
    while True:
        out = []
        while True:
            head, sep, tail = buffer.partition(b"\r\n")
            if not sep:
                break
            size = int(head, 16)
            if len(tail) < size + 2:
                break
            buffer = tail[size + 2 :]
            if size == 0:
                if out:
                    yield b"".join(out)
                return
            out.append(tail[:size])
        if out:
            yield b"".join(out)
        more = await reader.read(2**16)
        if not more:
            raise ValueError("the connection was closed in the middle of an answer")
        buffer += more
