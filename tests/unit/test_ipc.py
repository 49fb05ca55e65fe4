"""Frames arrive whole however the stream is cut, and every message arrives as it was sent."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import socket
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import rapid_infer.ipc
from rapid_infer.cache.prefix import HashExtra
from rapid_infer.config import EngineArgs
from rapid_infer.engine.request import Request
from rapid_infer.engine.results import Finished, StepOutputs, TokenLogprobs
from rapid_infer.errors import ConfigError, EngineDeadError, RequestError, WeightError
from rapid_infer.frontend import EngineInfo
from rapid_infer.ipc import messages
from rapid_infer.outputs import FinishReason
from rapid_infer.params import SamplingParams
from rapid_infer.processes.channel import AsyncChannel, Channel, FrameError, FrameReader, frame
from rapid_infer.registry import Entry

PAYLOADS = [b"", b"x", bytes(range(256)) * 40, b"last"]
FOLDER = Path(rapid_infer.ipc.__file__).parent


@pytest.mark.parametrize("step", [1, 3, 4, 5, 1000, 10**6])
def test_frames_are_whole_however_the_stream_is_cut(step: int) -> None:
    stream = b"".join(map(frame, PAYLOADS))
    reader = FrameReader()
    found: list[bytes] = []
    for i in range(0, len(stream), step):
        found += reader.feed(stream[i : i + step])
    reader.end()
    assert found == PAYLOADS


def test_a_frame_that_is_too_large_is_refused_on_both_sides() -> None:
    expected = "a message of 11 bytes is larger than a frame may be: expected at most 10"
    assert frame(bytes(10), 10)
    with pytest.raises(FrameError, match=expected):
        frame(bytes(11), 10)
    with pytest.raises(FrameError, match=expected):
        FrameReader(10).feed(frame(bytes(11))[:4])


def test_the_blocking_side_reads_frames_and_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        left, right = Channel(ours, 2**20), Channel(theirs)
        assert not right.wait(0)
        with pytest.raises(FrameError):
            left.send(bytes(2**20 + 1))
        for payload in PAYLOADS:
            left.send(payload)
        assert right.wait(1)
        assert [right.receive() for _ in PAYLOADS] == PAYLOADS
        ours.shutdown(socket.SHUT_WR)
        assert right.wait(1)
        assert right.receive() is None


def test_a_frame_cut_off_by_the_end_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(b"hello")[:-1])
        ours.close()
        with pytest.raises(FrameError, match="in the middle of a message"):
            Channel(theirs).receive()


class Listener:
    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.lost: list[Exception | None] = []
        self.done = asyncio.Event()

    def message_received(self, payload: bytes) -> None:
        self.payloads.append(payload)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)
        self.done.set()


def listen(peer: Any) -> Listener:
    """Runs `peer(socket)` in a thread against an `AsyncChannel` that sends 4 MB and reads to the end."""
    listener = Listener()

    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = AsyncChannel(ours, listener)
        # More than the socket takes at once, partly before an event loop is attached.
        channel.send(frame(bytes(2**21)))
        channel.attach()
        channel.send(frame(b"\1" * 2**21))
        thread = asyncio.get_running_loop().run_in_executor(None, peer, theirs)
        await asyncio.wait_for(listener.done.wait(), 5)
        await thread
        channel.send(frame(b"nobody listens"))

    asyncio.run(main())
    return listener


def test_the_asyncio_side_sends_and_receives_large_messages() -> None:
    received = []

    def peer(sock: socket.socket) -> None:
        with sock:
            channel = Channel(sock)
            received.extend([channel.receive(), channel.receive()])
            for payload in [*PAYLOADS, bytes(2**21)]:
                channel.send(payload)

    listener = listen(peer)
    assert received == [bytes(2**21), b"\1" * 2**21]
    assert listener.payloads == [*PAYLOADS, bytes(2**21)]
    assert listener.lost == [None]


def test_the_asyncio_side_hands_on_what_came_before_the_connection_broke() -> None:
    def peer(sock: socket.socket) -> None:
        with sock:
            # Closing with unread data resets the connection.
            sock.sendall(frame(b"last words") + frame(b"cut off")[:-2])

    listener = listen(peer)
    assert listener.payloads == [b"last words"]
    assert len(listener.lost) == 1


ENTRY = Entry("Arch", "pkg.mod:Class", "dist", "1.0", "entry point", "/somewhere", ("rapid-infer>=0.1",), None)
ARGS = EngineArgs(dtype="float32", max_num_seqs=3, op_priority={"paged_attention": ["torch"]})
INFO = EngineInfo("Arch", "float32", "cpu", 199, 512, (1, 2), 7, True, {"temperature": 0.6, "top_k": 20})
MINUS = float("-inf")


def sample_step() -> StepOutputs:
    """Every field filled."""
    return StepOutputs(
        ["a/0/0", "b/1/0"],
        [5, 198],
        [Finished("b/1/0", FinishReason.STOP, None, 16), Finished("c/2/0", FinishReason.ERROR, "NaN", 0)],
        {"a/0/0": TokenLogprobs([5, 9, 5], [-1.5, MINUS, -0.25], 2), "b/1/0": TokenLogprobs([198], [-3.0], 1)},
        {"a/0/0": [TokenLogprobs([1], [-0.5], 1), TokenLogprobs([2, 3], [-2.0, -1.0], 4)], "b/1/0": []},
        {"a/0/0": 0, "b/1/0": 16},
    )


@pytest.mark.parametrize(
    "message",
    [
        messages.Start("/model", ENTRY, ARGS, 20),
        messages.AddRequest("a/0/0", b"\1\0\0\0\2\0\0\0", {"logit_bias": {3: -1.5}}, (1,), 20, -(2**63), 1, b"\0key"),
        messages.AddRequest("a/0/0", b"\1\0\0\0", {}, (), 20, 2**63 - 1, 0, None),
        messages.Abort(["a/0/0"]),
        messages.ResetPrefixCache(),
        messages.GetStats(),
        messages.Stop(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_to_the_engine_arrive_as_sent(message: messages.ToEngine) -> None:
    assert messages.to_engine(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Ready(INFO),
        messages.StartFailed("WeightError", "missing"),
        messages.Outputs(sample_step()),
        messages.Outputs(StepOutputs()),
        messages.RequestRefused("a/0/0", "too long"),
        messages.Stats(1, 2, 3, 4),
        messages.Died("device lost"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_from_the_engine_arrive_as_sent(message: messages.FromEngine) -> None:
    assert messages.from_engine(messages.encode(message)) == message


def test_no_field_of_a_new_request_is_lost() -> None:
    params = SamplingParams(0.5, top_k=3, logit_bias={7: 1.0}, allowed_token_ids=(1, 7), stop=("x",), n=2, logprobs=1)
    request = Request(
        "a/0/1", np.array([1, 2], np.int32), params, (9,), 30, -5, 1, b"key", (HashExtra(1, 2, b"image"),)
    )
    message = messages.to_engine(messages.encode(messages.pack_request(request)))
    assert isinstance(message, messages.AddRequest)
    arrived = messages.unpack_request(message)
    for field in dataclasses.fields(Request):
        assert np.array_equal(getattr(arrived, field.name), getattr(request, field.name)), field.name
    message.params["temperature"] = -1.0
    with pytest.raises(RequestError, match="temperature must be"):
        messages.unpack_request(message)


def test_numbers_of_numpy_and_texts_of_enums_travel_as_what_they_are() -> None:
    class Kind(StrEnum):
        A = "a"

    values = {"a": np.float64(0.5), "b": Kind.A}
    message = messages.AddRequest("", b"", values, (), 0, 0, 0, None)
    assert messages.to_engine(messages.encode(message)).params == {"a": 0.5, "b": "a"}  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [object(), 2**64, "\ud800", {1: {object()}}])
def test_a_value_that_msgpack_does_not_have_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError):
        messages.encode(messages.AddRequest("", b"", {"x": value}, (), 0, 0, 0, None))


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\xc1", b"hello", messages.encode(messages.Died("x"))])
def test_what_is_no_message_to_the_engine_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.to_engine(payload)


def test_typed_errors_keep_their_type_and_others_their_name() -> None:
    class Special(WeightError):
        pass

    for error in (ConfigError("a"), WeightError("b"), Special("c")):
        again = messages.unpack_failure(messages.pack_failure(error))
        assert (type(again), str(again)) == (WeightError if type(error) is Special else type(error), str(error))
    again = messages.unpack_failure(messages.pack_failure(MemoryError("no room")))
    assert isinstance(again, EngineDeadError)
    assert "MemoryError: no room" in str(again)


def test_nothing_here_imports_pickle_or_what_uses_it() -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "zmq"}
    for file in [*FOLDER.glob("*.py"), *FOLDER.parent.glob("processes/*.py"), FOLDER.parent / "async_llm.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.partition(".")[0] for name in names}, file.name


def test_an_engine_whose_front_is_gone_before_it_starts_just_ends() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "rapid_infer.ipc.engine_process", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    ours.close()
    assert process.wait(10) == 0
