"""Keys, limits, drains and deaths; each server here is started for it."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import ROOT, Server, stub_server
from test_streams import open_stream

KEY = "a-key-nobody-may-see"


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(one) for one in text.split()]


def until(check: object, timeout: float = 20) -> None:
    end = time.monotonic() + timeout
    while not check():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_keys_and_limits(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"other\n{KEY}\n", encoding="utf-8")
    options = ["--api-key-file", str(keys), "--max-queue", "1", "--max-body-mb", "1", "--max-output-tokens", "9"]
    with stub_server(tmp_path, *options, env={"STUB_ROWS": "2", "STUB_STEP": "0.01"}) as server:
        bearer = {"Authorization": f"Bearer {KEY}"}
        assert server.get("/health").status == 200
        for path in ("/", "/v1/models", "/metrics", "/ready", "/version", "/nowhere"):
            refused = server.get(path)
            assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
            assert server.get(path, headers={"Authorization": f"Bearer {KEY}x"}).status == 401
        assert server.get("/v1/models", headers=bearer).status == 200
        assert server.get("/v1/models", headers={"Authorization": "Bearer other"}).status == 200
        assert server.get("/", headers={}).headers["www-authenticate"].startswith("Basic")
        basic = base64.b64encode(f"me:{KEY}".encode()).decode()
        assert b"<html" in server.get("/", headers={"Authorization": f"Basic {basic}"}).body
        assert server.get("/", headers={"Authorization": "Basic !"}).status == 401

        body = {"prompt": "secret words of a prompt", "max_tokens": 500}
        capped = server.post("/v1/completions", body, headers=bearer).json
        assert capped["usage"]["completion_tokens"] == 9
        large = server.post("/v1/completions", b" " * (2**20 + 1), headers=bearer)
        assert (large.status, large.param) == (413, "body")
        connection = server.connect()
        connection.request("POST", "/v1/completions", iter([b" " * 2**20] * 2), bearer, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        assert server.post("/start_profile", {}, headers=bearer).status == 404
        many = server.post("/v1/completions", {"prompt": ["a"] * 2, "n": 2}, headers=bearer)
        assert (many.status, many.param) == (400, "n")
        server.post("/v1/completions", {**body, "temperature": "secret words"}, headers=bearer)
    assert KEY not in server.text
    assert "secret words" not in server.text
    assert "path=/v1/completions status=200 prompt_tokens=24" in server.text


def test_a_full_queue_and_a_drain(tmp_path: Path) -> None:
    options = ["--max-queue", "1", "--drain-timeout", "3", "--log-format", "json"]
    with stub_server(tmp_path, *options, env={"STUB_ROWS": "2", "STUB_STEP": "0.01"}) as server:
        held = [open_stream(server, stream=True, max_tokens=100_000) for _ in range(3)]
        until(lambda: server.metric("rapid_infer:sequences_in_flight") == 3)
        refused = server.complete()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["error"]["type"] == "rate_limit_error"
        for sock in held[1:]:
            sock.close()
        until(lambda: server.metric("rapid_infer:sequences_in_flight") == 1)
        short = open_stream(server, stream=True, max_tokens=60)
        until(lambda: server.metric("rapid_infer:sequences_in_flight") == 2)

        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status == 503)
        assert server.get("/health").status == 200
        assert server.complete().status == 503
        with short.makefile("rb") as file:
            data = b""
            while piece := file.read1(65536):
                data += piece
                if b"[DONE]" in data:
                    break
        assert b'"finish_reason":"length"' in data
        assert server.process.wait(15) == 0
        lines = [json.loads(line) for line in server.text.splitlines() if line.startswith("{")]
        assert {200, 429, 499, 503} <= {line["status"] for line in lines}
        assert all(line["id"] and line["ms"] >= 0 for line in lines)
        for sock in (*held, short):
            sock.close()


def test_a_stuck_engine_and_a_dead_one(tmp_path: Path) -> None:
    with stub_server(tmp_path, "--health-timeout", "1.5", env={"STUB_STEP": "0.01"}) as server:
        (engine,) = children(server.process.pid)
        assert not any("libtorch" in line for line in Path(f"/proc/{server.process.pid}/maps").read_text().splitlines())
        os.kill(engine, signal.SIGSTOP)
        until(lambda: server.get("/health").status == 503)
        assert "said nothing" in server.get("/ready").json["error"]["message"]
        os.kill(engine, signal.SIGCONT)
        until(lambda: server.get("/health").status == 200)

        stream = open_stream(server, stream=True, max_tokens=100_000)
        stream.recv(200)
        os.kill(engine, signal.SIGKILL)
        with stream, stream.makefile("rb") as file:
            data = b"".join(iter(lambda: file.read1(65536), b""))
        assert b"killed by SIGKILL" in data
        assert server.process.wait(10) == 1
        assert "the engine has ended: the engine process" in server.text


def test_a_port_that_is_taken_is_said_before_the_model_loads(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "rapid_infer.cli", "serve", str(tmp_path), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot serve on 127.0.0.1 port {port}: Address already in use")


def test_importing_the_server_imports_no_torch() -> None:
    code = "import sys, rapid_infer.server.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("content", ["", "\n"])
def test_a_key_file_without_a_key(tmp_path: Path, content: str) -> None:
    from rapid_infer.cli.serve import read_keys
    from rapid_infer.errors import ConfigError

    (tmp_path / "keys").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_profiles(server: Server) -> None:
    """The trace is on disk when stop answers."""
    started = server.post("/start_profile", {"num_steps": 3, "profile_prefix": "mine", "output_dir": "a/b"})
    assert started.status == 200, started.body
    assert server.post("/start_profile", {}).status == 409
    server.complete(max_tokens=8, ignore_eos=True)
    path = Path(server.post("/stop_profile", {}).json["path"])
    assert path.name == "mine.trace.json"
    assert path.parent.parts[-3:] == ("profiles", "a", "b")
    assert path.read_text(encoding="utf-8").count('"name": "engine.step"') <= 3
    assert "engine.schedule" in path.read_text(encoding="utf-8")
    assert server.post("/stop_profile", {}).status == 409
    for bad in ({"output_dir": "../x"}, {"output_dir": "/tmp"}, {"profile_prefix": "a/b"}, {"num_steps": 0}):
        assert server.post("/start_profile", bad).param == next(iter(bad))


def test_the_examples_of_the_pages_answer_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command as it is there: no MODEL is `demo`."""
    from rapid_infer.hub.demo import demo_dir, is_complete

    if not is_complete(demo_dir()):
        pytest.skip("the demo model is not in the cache; make demo fetches it")
    server = Server(["-m", "rapid_infer.cli", "serve", "--device", "cpu"], tmp_path / "server.log")
    try:
        server.wait_ready()
        for name in ("README.md", "docs/quick-start.md"):
            page = (ROOT / name).read_text(encoding="utf-8").replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
            (curl,) = re.findall(r"\$ (curl .*?\}')\n(\{.*?)\n", page, re.DOTALL)
            done = subprocess.run(curl[0], shell=True, capture_output=True, text=True, check=True, timeout=60)
            pattern = ".*".join(map(re.escape, curl[1].split("…")))
            # The second page asks what the first has left in the prefix cache.
            pattern = re.sub(r'("cached_tokens":)0', r"\1\\d+", pattern)
            assert re.fullmatch(pattern, done.stdout), done.stdout
            (example,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
            exec(example, {})
            assert capsys.readouterr().out == "The capital of Japan is Tokyo."
    finally:
        assert server.stop() == 0
