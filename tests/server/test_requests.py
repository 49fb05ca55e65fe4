"""Request shapes, by the official client and by hand: the status, the fields, and for refusals the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from serving import Server, events

USER = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "additionalProperties": False}}},
]
PARTS = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
CALLED = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]

GOOD_CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "model": {"model": "tiny"},
    "parts": {"messages": [{"role": "user", "content": PARTS}]},
    "roles": {"messages": [{"role": "developer", "content": "D"}, {"role": "system", "content": "S"}, *USER]},
    "null content": {"messages": [*USER, {"role": "assistant", "content": None}, *USER]},
    "earlier calls": {"messages": CALLED},
    "continued": {"messages": [*USER, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
    "prefix": {"messages": [*USER, {"role": "assistant", "content": "Well", "prefix": True}]},
    "null fields": dict.fromkeys(("temperature", "max_completion_tokens", "stop", "seed", "tools", "n", "logprobs")),
    "greedy": {"temperature": 0},
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3},
    "penalties": {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {"65": 5.5}},
    "stop text": {"stop": "z"},
    "stop list": {"stop": ["zz", "yy"], "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": [1, 2], "min_tokens": 2},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 4},
    "the smaller wins": {"max_tokens": 9, "max_completion_tokens": 4},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "unknown fields": {"user": "u", "metadata": {"a": "b"}, "store": True, "no_such_field": [1]},
    "thinking off": {"chat_template_kwargs": {"enable_thinking": False, "no_such_name": 1}},
    "effort": {"reasoning_effort": "low"},
    "tools": {"tools": TOOLS},
    "tools unused": {"tools": TOOLS, "tool_choice": "none"},
    "text": {"response_format": {"type": "text"}},
    "modalities": {"modalities": ["text"]},
}


@pytest.mark.parametrize("name", GOOD_CHATS)
def test_chats(server: Server, name: str) -> None:
    answer = server.chat(ignore_eos=True, **GOOD_CHATS[name])
    assert answer.status == 200, answer.body
    body = answer.json
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["usage"]["completion_tokens"] == 4
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    if name == "logprobs":
        assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [3] * 4


GOOD_COMPLETIONS: dict[str, tuple[dict[str, Any], int]] = {
    "text": ({}, 1),
    "ids": ({"prompt": [1, 2, 3]}, 1),
    "texts": ({"prompt": ["a", "b"]}, 2),
    "lists of ids": ({"prompt": [[1, 2], [3]]}, 2),
    "both": ({"prompt": ["a", [3, 4]], "n": 2}, 4),
    "more than rows": ({"n": 20}, 20),
    "logprobs": ({"logprobs": 2}, 1),
    "echo": ({"echo": True, "logprobs": 0}, 1),
    "best_of": ({"best_of": 2, "n": 2}, 2),
    "prompt_logprobs": ({"prompt_logprobs": 1}, 1),
    "allowed": ({"allowed_token_ids": [65, 66]}, 1),
}


@pytest.mark.parametrize("name", GOOD_COMPLETIONS)
def test_completions(server: Server, name: str) -> None:
    given, choices = GOOD_COMPLETIONS[name]
    answer = server.complete(ignore_eos=True, **given)
    assert answer.status == 200, answer.body
    body = answer.json
    assert [one["index"] for one in body["choices"]] == list(range(choices))
    assert body["usage"]["completion_tokens"] == 4 * choices
    text = body["choices"][0]["text"]
    if name == "echo":
        assert text.startswith("Hello")
        assert len(body["choices"][0]["logprobs"]["tokens"]) == 5 + 4
        assert body["choices"][0]["logprobs"]["token_logprobs"][0] is None
    if name == "allowed":
        assert set(text) <= set(server.post("/detokenize", {"tokens": [65, 66]}).json["prompt"])


IMAGE = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
RECURSIVE = {"$ref": "#"}

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "pirate", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": [{**CALLED[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"thinking": {"type": "perhaps"}}, "thinking"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": RECURSIVE}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
    ({"guided_regex": "(["}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"modalities": ["audio"]}, "modalities"),
]


@pytest.mark.parametrize(("given", "param"), BAD_CHATS, ids=lambda value: str(value)[:50])
def test_refused_chats(server: Server, given: dict[str, Any], param: str) -> None:
    answer = server.chat(**given)
    assert (answer.status, answer.param) == (400, param), answer.body
    assert answer.json["error"]["type"] == "invalid_request_error"


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [1] * 512}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": -1}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("given", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:50])
def test_refused_completions(server: Server, given: dict[str, Any], param: str, stream: bool) -> None:
    answer = server.complete(stream=stream, **given)
    assert (answer.status, answer.param) == (400, param), answer.body


def test_an_overlong_prompt_is_told_the_lengths(server: Server) -> None:
    message = server.complete(prompt=[1] * 600).json["error"]["message"]
    assert "600" in message
    assert "512" in message


def test_an_image_part_is_named_with_the_model_s_limits(server: Server) -> None:
    message = server.chat(messages=[{"role": "user", "content": IMAGE}]).json["error"]["message"]
    assert "messages[0].content[1]" in message
    assert "image_url" in message
    assert "text alone" in message


BODIES: dict[str, bytes] = {
    "empty": b"",
    "no json": b"{",
    "a list": b"[]",
    "no utf-8": b'{"prompt": "\xff"}',
    "a surrogate": b'{"prompt": "\\ud800", "max_tokens": 1}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "huge number": b'{"prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}",
    "deep": b'{"prompt": "a", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep schema": b'{"prompt": "a", "guided_json": ' + b'{"not": ' * 900 + b"{}" + b"}" * 901,
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_none(server: Server, name: str) -> None:
    answer = server.post("/v1/completions", BODIES[name])
    assert answer.status == 400, answer.body
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.param in (("guided_json",) if name == "deep schema" else ("body", "prompt", "max_tokens"))


def test_a_model_that_is_not_there_is_404(server: Server) -> None:
    answer = server.chat(model="gpt-4")
    assert (answer.status, answer.param, answer.json["error"]["code"]) == (404, "model", "model_not_found")


def test_small_routes(server: Server) -> None:
    assert server.get("/health").status == server.get("/ready").status == 200
    assert server.get("/version").json["version"]
    assert server.get("/v1/models").json["data"][0]["max_model_len"] == 512
    assert server.get("/v1/models/tiny").json["id"] == "tiny"
    assert server.get("/v1/models/other").status == 404
    assert server.get("/nowhere").status == 404
    assert server.get("/v1/completions").headers["allow"] == "POST"
    assert "/v1/completions" in server.get("/openapi.json").json["paths"]
    given = server.get("/health", headers={"X-Request-Id": "my-id"})
    assert given.headers["x-request-id"] == "my-id"
    assert server.get("/health", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"] != "x" * 500


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"://" not in page.body
    assert b"src=" not in page.body
    assert server.call("HEAD", "/").status == 200


def test_tokenize_and_back(server: Server) -> None:
    made = server.post("/tokenize", {"prompt": "Grüße", "return_token_strs": True}).json
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert server.post("/detokenize", {"tokens": made["tokens"]}).json == {"prompt": "Grüße"}
    chat = server.post("/tokenize", {"messages": USER}).json
    assert chat["count"] == server.chat().json["usage"]["prompt_tokens"]
    assert server.post("/tokenize", {}).param == "prompt"
    assert server.post("/detokenize", {"tokens": [320]}).param == "tokens"


def test_streams_say_what_whole_answers_say(server: Server, client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "temperature": 0.0,
        "max_tokens": 12,
        "n": 2,
        "seed": 4,
        "logprobs": True,
    }
    whole = client.chat.completions.create(messages=USER, **options)  # type: ignore[call-overload]
    texts, reasons, tokens = {0: "", 1: ""}, {}, {0: 0, 1: 0}
    usage = None
    for chunk in client.chat.completions.create(  # type: ignore[call-overload]
        messages=USER, stream=True, stream_options={"include_usage": True}, **options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
            tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert [one.message.content for one in whole.choices] == list(texts.values())
    assert [one.finish_reason for one in whole.choices] == list(reasons.values())
    assert list(tokens.values()) == [12, 12]
    assert usage.completion_tokens == whole.usage.completion_tokens == 24
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_bytes_of_a_stream(server: Server) -> None:
    answer = server.complete(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(answer.body)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-2]["choices"][0]["finish_reason"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == sorted(
        chunk["usage"]["completion_tokens"] for chunk in chunks
    )
    whole = server.complete(echo=True, n=2, temperature=0, prompt=["ab", [70, 71]]).json["choices"]
    pieces = events(server.complete(echo=True, n=2, temperature=0, prompt=["ab", [70, 71]], stream=True).body)
    texts = dict.fromkeys(range(4), "")
    for chunk in pieces:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {one["index"]: one["text"] for one in whole}


def test_echo_of_no_tokens(server: Server) -> None:
    body = server.complete(max_tokens=0, echo=True, logprobs=1).json
    assert body["choices"][0]["text"] == "Hello"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 5
    assert body["usage"]["completion_tokens"] == 0


def test_cached_tokens_are_counted(server: Server) -> None:
    prompt = list(range(100, 200))
    server.complete(prompt=prompt)
    assert server.complete(prompt=prompt).json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_a_stop_text_ends_the_answer(server: Server) -> None:
    text = server.complete(temperature=0, max_tokens=30).json["choices"][0]["text"]
    stop = text[4:6]
    choice = server.complete(temperature=0, max_tokens=30, stop=stop).json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[: text.index(stop)], "stop", stop)


@pytest.mark.parametrize("stream", [False, True])
def test_output_in_a_form(server: Server, stream: bool) -> None:
    """The weights are random: what has a form has it by the grammar."""
    forms: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, _fits),
        ({"guided_json": json.dumps(SCHEMA)}, _fits),
        ({"guided_regex": "[0-9]{3}-[xyz]"}, lambda text: len(text) == 5 and text[3] == "-"),
        ({"structured_outputs": {"choice": ["yes", "never"]}}, lambda text: text in ("yes", "never")),
    ]
    for given, fits in forms:
        answer = server.chat(max_tokens=200, stream=stream, logit_bias=no_space(server), enable_thinking=False, **given)
        assert answer.status == 200, answer.body
        if stream:
            text = "".join(one["choices"][0]["delta"].get("content") or "" for one in events(answer.body))
        else:
            text = answer.json["choices"][0]["message"]["content"]
        assert fits(text), (given, text)


def no_space(server: Server) -> dict[str, float]:
    """Random weights would fill the room between JSON's tokens for ever."""
    return dict.fromkeys(map(str, server.post("/tokenize", {"prompt": " \n\r\t"}).json["tokens"]), -100.0)


def _fits(text: str) -> bool:
    made = json.loads(text)
    return set(made) == {"a", "b"} and 0 <= made["a"] <= 99 and isinstance(made["b"], bool)


def test_other_rows_do_not_see_a_grammar(server: Server) -> None:
    from concurrent.futures import ThreadPoolExecutor

    alone = server.complete(temperature=0, max_tokens=24).json["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        forms = [pool.submit(server.complete, guided_regex="[ab]{40}", max_tokens=60) for _ in range(3)]
        beside = pool.submit(server.complete, temperature=0, max_tokens=24)
        assert beside.result().json["choices"][0]["text"] == alone
        assert all(len(one.result().json["choices"][0]["text"]) == 40 for one in forms)


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(server: Server, client: OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice, parallel in (("required", False), (named, True)):
        options: dict[str, Any] = {
            "model": "tiny",
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "max_tokens": 300,
        }
        answer = client.chat.completions.create(
            messages=USER, stream=stream, extra_body={"logit_bias": no_space(server)}, **options
        )  # type: ignore[call-overload]
        calls: list[tuple[str, str]] = []
        if stream:
            for chunk in answer:
                for call in chunk.choices[0].delta.tool_calls or []:
                    if call.function.name:
                        calls.append((call.function.name, ""))
                    else:
                        name, text = calls[call.index]
                        calls[call.index] = (name, text + call.function.arguments)
                reason = chunk.choices[0].finish_reason
        else:
            message = answer.choices[0].message
            assert message.content is None
            calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
            reason = answer.choices[0].finish_reason
        assert reason == "tool_calls"
        (call,) = calls
        assert call[0] in (("add",) if choice == named else ("add", "noop"))
        assert call[0] == "noop" or _fits(call[1])
