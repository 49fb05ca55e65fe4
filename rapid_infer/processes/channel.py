"""Frames over a stream socket: four bytes of length, then the message. A blocking side and an asyncio side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import weakref
from collections import deque
from typing import Protocol

from rapid_infer.errors import RapidInferError

MAX_FRAME = 256 * 2**20
"""Bytes. Far above any step's results; a length beyond it means that the stream is not what it should be."""

_HEAD = 4
_CHUNK = 2**18


class FrameError(RapidInferError, ValueError):
    """A frame that is larger than allowed, or cut off by the end of the stream."""


def frame(payload: bytes, max_frame: int = MAX_FRAME) -> bytes:
    """The bytes that carry `payload`. FrameError when it is too large."""
    _check_size(len(payload), max_frame)
    return len(payload).to_bytes(_HEAD, "little") + payload


def _check_size(size: int, max_frame: int) -> None:
    if size > max_frame:
        raise FrameError(f"a message of {size} bytes is larger than a frame may be: expected at most {max_frame}")


class FrameReader:
    """Cuts a stream that comes in any pieces into its frames."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. FrameError as soon as a length that is too large is seen."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= _HEAD:
            size = int.from_bytes(buffer[start : start + _HEAD], "little")
            _check_size(size, self._max_frame)
            stop = start + _HEAD + size
            if len(buffer) < stop:
                break
            frames.append(bytes(buffer[start + _HEAD : stop]))
            start = stop
        del buffer[:start]
        return frames

    def end(self) -> None:
        """The stream has ended. FrameError when a frame was cut off."""
        if self._buffer:
            raise FrameError(f"the connection ended in the middle of a message, after {len(self._buffer)} bytes of it")


class Channel:
    """The blocking side. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, max_frame: int = MAX_FRAME) -> None:
        self.sock = sock
        self._max_frame = max_frame
        self._reader = FrameReader(max_frame)
        self._frames: deque[bytes] = deque()

    def send(self, payload: bytes) -> None:
        """FrameError, and nothing sent, when it is too large; OSError when the other side is gone."""
        self.sock.sendall(frame(payload, self._max_frame))

    def receive(self) -> bytes | None:
        """The next message; None when the other side has closed. FrameError, OSError."""
        while not self._frames:
            data = self.sock.recv(_CHUNK)
            if not data:
                self._reader.end()
                return None
            self._frames += self._reader.feed(data)
        return self._frames.popleft()

    def wait(self, timeout: float) -> bool:
        """Whether `receive` has something to read, or the end, within `timeout` seconds."""
        if self._frames:
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(timeout * 1000))


class Receiver(Protocol):
    """Whoever an `AsyncChannel` calls; must not raise."""

    def message_received(self, payload: bytes) -> None: ...

    def connection_lost(self, error: Exception | None) -> None:
        """Called once, and nothing after it. None: the other side has closed."""
        ...


class AsyncChannel:
    """The asyncio side: callbacks on whichever event loop it is attached to, which may change between uses.

    Sending never waits, so that a cancelled task cannot leave half a frame behind; what the socket does not take at
    once goes out when it can. The receiver is held weakly: an event loop keeps nobody alive who listens here.
    """

    def __init__(self, sock: socket.socket, receiver: Receiver, max_frame: int = MAX_FRAME) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._receiver = weakref.ref(receiver)
        self._reader = FrameReader(max_frame)
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._closed = False

    @property
    def in_use_elsewhere(self) -> bool:
        """Whether the event loop that is served runs in another thread."""
        running = asyncio._get_running_loop()
        return self._loop is not None and self._loop is not running and self._loop.is_running()

    def attach(self) -> None:
        """Serve the running event loop from now on; the one served so far must have ended."""
        loop = asyncio.get_running_loop()
        if self._closed or loop is self._loop:
            return
        self._detach()
        self._loop = loop
        loop.add_reader(self._sock, self.read)
        if self._unsent:
            loop.add_writer(self._sock, self._write)

    @property
    def _usable(self) -> bool:
        """What a forked process has of the socket is its parent's."""
        return not self._closed and os.getpid() == self._process

    def send(self, framed: bytes) -> None:
        """Send what `frame` made. A lost connection is reported to the receiver, not here."""
        if not self._usable:
            return
        idle = not self._unsent
        self._unsent += framed
        if idle:
            self._write()
            if self._unsent and self._loop is not None:
                self._loop.add_writer(self._sock, self._write)

    def read(self) -> bool:
        """Take what has arrived; does not wait. False when there was nothing, or the connection is lost."""
        if not self._usable:
            return False
        error: Exception | None = None
        try:
            data = self._sock.recv(_CHUNK)
            frames = self._reader.feed(data)
            if not data:
                self._reader.end()
        except (BlockingIOError, InterruptedError):
            return False
        except (OSError, FrameError) as caught:
            data, frames, error = b"", [], caught
        for payload in frames:
            receiver = self._receiver()
            if receiver is None or self._closed:
                return False
            receiver.message_received(payload)
        if not data:
            self._lose(error)
        return not self._closed

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # The reading side says why: what the other side wrote before it went is still there to be read.
            self._unsent.clear()
            sent = 0
        del self._unsent[:sent]
        if not self._unsent and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_writer(self._sock)

    def _lose(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            if (receiver := self._receiver()) is not None:
                receiver.connection_lost(error)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._loop = None

    def close(self) -> None:
        """Stop listening and close the socket."""
        if not self._closed:
            self._closed = True
            self._detach()
            with contextlib.suppress(OSError):
                self._sock.close()
