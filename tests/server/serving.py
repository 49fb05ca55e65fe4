"""A server in a process of its own, as a user starts it, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "benchmarks" / "stub_server.py"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def param(self) -> str | None:
        return self.json["error"]["param"]


class Server:
    """`command` is Python's arguments. What it prints goes to `log`."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        # Benchmarks hold the stub; a server finds it as the tests do.
        paths = [str(ROOT / "benchmarks"), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **(env or {})}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--port", "0"], stderr=out, stdout=out, env=environment, cwd=log.parent
            )
        self.port = 0

    def wait_ready(self, timeout: float = 60) -> Server:
        end = time.monotonic() + timeout
        while not (found := re.search(r"is ready on http://[\d.]+:(\d+)", self.text)):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.05)
        self.port = int(found[1])
        return self

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60
    ) -> Answer:
        connection = self.connect(timeout)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        return self.call("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Answer:
        return self.call("POST", path, body, **options)

    def chat(self, **body: Any) -> Answer:
        messages = [{"role": "user", "content": "Hello"}]
        return self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, **body})

    def complete(self, **body: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4, **body})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values that have these labels."""
        total = 0.0
        for line in self.get("/metrics").body.decode().splitlines():
            if re.match(re.escape(name) + r"[{ ]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def until_idle(self, timeout: float = 20) -> None:
        """Until the engine runs nothing and all its blocks are free; the counts are half a second old at most."""
        end = time.monotonic() + timeout
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(self.metric(f"vllm:{name}") for name in names) or self.metric("rapid_infer:sequences_in_flight"):
            assert time.monotonic() < end, self.get("/metrics").body.decode()
            time.sleep(0.1)

    def stop(self, timeout: float = 20) -> int:
        """By SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def events(body: bytes) -> list[Any]:
    """The data of server-sent events; AssertionError for bytes that are none. The last, [DONE], is checked and left
    out.
    """
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block[len("data: ") :]) for block in blocks]


@contextmanager
def stub_server(folder: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server over the stub engine."""
    server = Server(
        [str(STUB), str(folder / "stub"), "--served-model-name", "stub", *options], folder / "server.log", env
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()
