"""Several front processes over one engine: requests are shared out, and each may die alone."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import Server, events, stub_server
from test_robustness import children, until
from test_streams import open_stream

from rapid_infer.engine.results import Finished, StepOutputs, TokenLogprobs
from rapid_infer.ipc import messages
from rapid_infer.ipc.fronts import Fronts
from rapid_infer.outputs import FinishReason
from rapid_infer.processes.channel import Channel


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    except OSError:
        return ""


def fronts_of(server: Server) -> list[int]:
    return [pid for pid in children(server.process.pid) if "front_process" in command_of(pid)]


def is_whole(sock: socket.socket) -> bool:
    """Whether an answer comes to its end."""
    data = b""
    with sock:
        try:
            while b"[DONE]" not in data:
                if not (piece := sock.recv(65536)):
                    return False
                data += piece
        except ConnectionError:
            return False
    return True


def eventually(read: Callable[[], bool]) -> None:
    """As `until`, for what a dying process may answer."""

    def check() -> bool:
        try:
            return read()
        except OSError:
            return False

    until(check)


def test_a_step_is_divided_among_fronts() -> None:
    """Each gets what is its own of every kind, also when the batch changes."""
    (main, main_end), (other, other_end) = socket.socketpair(), socket.socketpair()
    fronts, second = Fronts(Channel(main)), Channel(other)
    fronts.own("b", second)
    fronts.own("d", second)
    scores = TokenLogprobs([1], [-0.5], 1)
    steps = [
        StepOutputs(["a", "b", "c"], [1, 2, 3], num_cached_tokens={"a": 0, "b": 16}),
        StepOutputs(["a", "b", "c"], [4, 5, 6], logprobs={"b": scores, "c": scores}),
        StepOutputs(["b", "d"], [7, 8], [Finished("d", FinishReason.STOP, None, 0)], prompt_logprobs={"b": [scores]}),
        StepOutputs(["b"], [9], [Finished("b", FinishReason.LENGTH, None, 16)]),
    ]
    for step in steps:
        fronts.send_step(step)

    def read(end: socket.socket, count: int) -> list[StepOutputs]:
        channel, found = Channel(end), []
        for _ in range(count):
            message = messages.from_engine(channel.receive() or b"")
            assert isinstance(message, messages.Outputs)
            found.append(message.step)
        return found

    assert read(main_end, 2) == [
        StepOutputs(["a", "c"], [1, 3], num_cached_tokens={"a": 0}),
        StepOutputs(["a", "c"], [4, 6], logprobs={"c": scores}),
    ]
    assert read(other_end, 4) == [
        StepOutputs(["b"], [2], num_cached_tokens={"b": 16}),
        StepOutputs(["b"], [5], logprobs={"b": scores}),
        steps[2],
        steps[3],
    ]
    for sock in (main, main_end, other, other_end):
        sock.close()


def test_fronts_share_an_engine_and_one_may_die(tmp_path: Path) -> None:
    with stub_server(tmp_path, "--front-processes", "2", env={"STUB_STEP": "0.005"}) as server:
        fronts = fronts_of(server)
        assert len(fronts) == 2
        with ThreadPoolExecutor(16) as pool:
            options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20}
            answers = list(pool.map(lambda _: server.complete(**options).body, range(64)))
        assert all(events(body)[-1]["usage"]["completion_tokens"] == 20 for body in answers)
        assert server.metric("vllm:generation_tokens_total") == 64 * 20
        assert server.metric("rapid_infer:sequences_in_flight") == 0

        held = [open_stream(server, stream=True, max_tokens=400) for _ in range(12)]
        until(lambda: server.metric("rapid_infer:sequences_in_flight") == 12)
        os.kill(fronts[0], signal.SIGKILL)
        whole = sum(map(is_whole, held))
        # Those of the other front go on; the kernel has shared them out.
        assert whole < 12
        until(lambda: len(fronts_of(server)) == 2 and fronts[0] not in fronts_of(server))
        eventually(lambda: server.text.count("another one takes its place") == 1)
        for _ in range(20):
            eventually(lambda: server.complete().status == 200)
        eventually(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.metric("rapid_infer:sequences_in_flight") == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    assert all(not command_of(pid) for pid in fronts)


def test_without_its_engine_everything_ends(tmp_path: Path) -> None:
    with stub_server(tmp_path, "--front-processes", "2") as server:
        every = children(server.process.pid)
        (engine,) = set(every) - set(fronts_of(server))
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(10) == 1
        assert not any(map(command_of, every))
