"""Streams: what parsers make of them, clients that leave or do not read, and what is counted."""

from __future__ import annotations

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from serving import Server, events

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


def chunks_of(stub: Server, said: str, **body: Any) -> list[Any]:
    messages = [{"role": "user", "content": said}]
    answer = stub.post("/v1/chat/completions", {"messages": messages, "stream": True, **body})
    assert answer.status == 200, answer.body
    return events(answer.body)


def gathered(chunks: list[Any]) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Content, reasoning, calls and the finish reason."""
    content, reasoning, calls, reason = "", "", [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    calls.append((call["function"]["name"], ""))
                name, text = calls[call["index"]]
                calls[call["index"]] = (name, text + call["function"]["arguments"])
            reason = choice["finish_reason"] or reason
    return content, reasoning, calls, reason


CASES: dict[str, tuple[str, dict[str, Any], tuple[str, str, list[tuple[str, str]], str]]] = {
    "prose": ("Hi there.", {}, ("Hi there.", "", [], "stop")),
    "thinking": (THOUGHT + "Fine.", {}, ("Fine.", "Let me see.", [], "stop")),
    "thinking left out": (THOUGHT + "Fine.", {"include_reasoning": False}, ("Fine.", "", [], "stop")),
    "thinking off": (THOUGHT, {"enable_thinking": False}, (THOUGHT, "", [], "stop")),
    "a call": ("Look:\n" + CALL, {"tools": [WEATHER]}, ("Look:", "", [("weather", '{"city": "Köln"}')], "tool_calls")),
    "thought and call": (
        THOUGHT + CALL,
        {"tools": [WEATHER], "enable_thinking": True},
        ("", "Let me see.", [("weather", '{"city": "Köln"}')], "tool_calls"),
    ),
    "no tools": (CALL, {}, (CALL, "", [], "stop")),
    "tools unused": (CALL, {"tools": [WEATHER], "tool_choice": "none"}, (CALL, "", [], "stop")),
    "tags in prose": ("a <think> b </think>", {}, ("a <think> b </think>", "", [], "stop")),
    "cut": (CALL, {"tools": [WEATHER], "max_tokens": 50}, ("", "", [("weather", '{"city')], "length")),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_parsed_alike_whole_and_streamed(stub: Server, name: str) -> None:
    said, body, expected = CASES[name]
    content, reasoning, calls, reason = gathered(chunks_of(stub, said, **body))
    if name == "cut":
        assert calls[0][0] == "weather"
        assert '{"city": "Köln"}'.startswith(calls[0][1])
        assert reason == "length"
        return
    assert (content, reasoning, calls, reason) == expected
    whole = stub.post("/v1/chat/completions", {"messages": [{"role": "user", "content": said}], **body}).json
    message = whole["choices"][0]["message"]
    found = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
    assert (message["content"] or "", message.get("reasoning_content", ""), found) == expected[:3]
    assert whole["choices"][0]["finish_reason"] == expected[3]


@pytest.mark.parametrize(
    ("body", "thinks"),
    [
        ({}, None),
        ({"tools": [WEATHER]}, False),
        ({"tools": [WEATHER], "reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True),
        ({"thinking": {"type": "auto"}, "reasoning_effort": "none"}, None),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, True),
    ],
    ids=str,
)
def test_the_order_in_which_thinking_is_decided(body: dict[str, Any], thinks: bool | None) -> None:
    import msgspec

    from rapid_infer.server.conversation import template_values
    from rapid_infer.server.schema import ChatRequest

    request = msgspec.convert({"messages": [], **body}, ChatRequest)
    values = template_values(request, frozenset({"enable_thinking"}), bool(request.tools))
    assert values.get("enable_thinking") is thinks


def test_a_template_may_want_arguments_as_text(tmp_path: Path) -> None:
    """As DeepSeek's, which adds them to a text."""
    import asyncio
    from types import SimpleNamespace

    import msgspec
    from byte_tokenizer import write_tokenizer

    from rapid_infer.server import conversation
    from rapid_infer.server.schema import Message
    from rapid_infer.text import Tokenizer

    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments + '>' }}{% endfor %}"
    )
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    write_tokenizer(tmp_path, 320, template + "{% endfor %}")
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = msgspec.convert([{"role": "assistant", "tool_calls": [call]}], list[Message])
    served: Any = SimpleNamespace(llm=SimpleNamespace(tokenizer=Tokenizer(tmp_path)), off_loop=_at_once)
    plain = conversation.plain_messages(messages)
    made = asyncio.run(conversation.encode(served, plain, [], {}, continued=False))
    assert made.text == '<{"a":1}>'


async def _at_once(size: int, work: Any) -> Any:
    return work()


def test_the_official_client_streams_calls(stub_client: OpenAI) -> None:
    with stub_client.chat.completions.stream(
        model="stub",
        messages=[{"role": "user", "content": CALL}],
        tools=[WEATHER],  # type: ignore[list-item]
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Köln"}


def open_stream(server: Server, small: bool = False, **body: Any) -> socket.socket:
    """A request whose answer nobody has read yet, and of which the system keeps little if it is to be `small`."""
    data = json.dumps({"prompt": [2, 2, 3], "max_tokens": 500, "ignore_eos": True, **body}).encode()
    sock = socket.socket()
    sock.settimeout(30)
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_the_request_in_the_engine(server: Server, stream: bool) -> None:
    server.until_idle()
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    made = server.metric("vllm:generation_tokens_total")
    sock = open_stream(server, stream=stream, n=4)
    end = time.monotonic() + 20
    while server.metric("rapid_infer:sequences_in_flight") == 0:
        assert time.monotonic() < end
    sock.close()
    server.until_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") - before == 4
    assert server.metric("vllm:generation_tokens_total") - made < 4 * 500


def test_many_streams_of_which_some_are_left(server: Server) -> None:
    """Then all blocks are free, and the counts are those of what was asked."""
    server.until_idle()
    names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = {name: server.metric(name) for name in names}
    lengths = server.metric("vllm:request_success_total", finished_reason="length")
    random_ = random.Random(0)
    plans = [(random_.randrange(4), random_.randint(1, 30), random_.randint(1, 40)) for _ in range(200)]

    def one(plan: tuple[int, int, int]) -> int:
        """Tokens that were made, as far as the client knows; -1 for one that left."""
        kind, num_tokens, num_prompt = plan
        body: dict[str, Any] = {"prompt": [9] * num_prompt, "max_tokens": num_tokens, "ignore_eos": True}
        if kind == 0:
            sock = open_stream(server, stream=True, prompt=[9] * num_prompt)
            sock.recv(100)
            sock.close()
            return -1
        if kind == 1:
            return server.post("/v1/completions", body).json["usage"]["completion_tokens"]
        body |= {"stream": True, "stream_options": {"include_usage": True}, "seed": 1, "temperature": kind - 2}
        return events(server.post("/v1/completions", body).body)[-1]["usage"]["completion_tokens"]

    with ThreadPoolExecutor(32) as pool:
        made = list(pool.map(one, plans))
    server.until_idle()
    assert [count for count in made if count >= 0] == [plan[1] for plan in plans if plan[0]]
    stayed = sum(count >= 0 for count in made)
    after = {name: server.metric(name) - before[name] for name in names}
    assert after["vllm:request_success_total"] == 200
    assert server.metric("vllm:request_success_total", finished_reason="length") - lengths >= stayed
    assert after["vllm:prompt_tokens_total"] == sum(plan[2] for plan in plans)
    assert after["vllm:generation_tokens_total"] >= sum(count for count in made if count >= 0)


def test_a_reader_that_does_not_read_holds_back_nobody(stub: Server) -> None:
    """What it has not read is merged, so it needs no more memory than its text, and is all there in the end."""
    sock = open_stream(stub, small=True, stream=True, max_tokens=3000, stream_options={"continuous_usage_stats": True})
    end = time.monotonic() + 30
    assert stub.complete(max_tokens=20).status == 200
    for running in (1, 0):
        while stub.metric("vllm:num_requests_running") != running:
            assert time.monotonic() < end
            time.sleep(0.1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    data = b""
    with sock:
        while b"[DONE]" not in data[-200:]:
            data += sock.recv(65536)
    assert b'"completion_tokens":3000,' in data
    assert data.count(b"data: ") < 2000
    stub.until_idle()


def test_a_fault_of_the_engine_is_a_500_of_its_request_alone(stub: Server) -> None:
    before = stub.metric("vllm:request_success_total", finished_reason="error")
    for stream in (False, True):
        answer = stub.complete(prompt=[1, 2], stream=stream)
        assert (answer.status, answer.json["error"]["type"]) == (500, "server_error")
        assert answer.json["error"]["message"] == "the stub was asked to fail"
    assert stub.metric("vllm:request_success_total", finished_reason="error") == before + 2
    assert stub.complete().status == stub.get("/health").status == 200


def test_metrics_are_what_prometheus_reads(server: Server) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    server.complete(stream=True, ignore_eos=True)
    families = {one.name: one for one in text_string_to_metric_families(server.get("/metrics").body.decode())}
    preemptions = families["vllm:num_preemptions"]
    assert (preemptions.type, [one.name for one in preemptions.samples]) == (
        "counter",
        ["vllm:num_preemptions_total"],
    )
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:inter_token_latency_seconds",
    ):
        samples = families[name].samples
        counts = [one.value for one in samples if one.name.endswith("_bucket")]
        assert counts == sorted(counts)
        (total,) = [one.value for one in samples if one.name.endswith("_count")]
        assert counts[-1] == total > 0
        assert all(one.labels["model_name"] == "tiny" for one in samples)
