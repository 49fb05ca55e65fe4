"""How a chat is put, without an engine: which parsers read the answer, and what limits it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from byte_tokenizer import TEMPLATE, write_tokenizer
from test_parsers import ALL_END, CALL, CALLS, END, SEP

from rapid_infer import SamplingParams
from rapid_infer.server import conversation
from rapid_infer.server.chat_form import ChatForm, make_form
from rapid_infer.server.metrics import Metrics
from rapid_infer.server.parsers.json_calls import DeepSeekParser, HermesParser
from rapid_infer.server.parsers.think import Begin, ThinkParser
from rapid_infer.server.schema import ChatRequest
from rapid_infer.server.served import Served
from rapid_infer.server.settings import ServerSettings
from rapid_infer.text import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
DEEPSEEK_TAGS = (CALLS, CALL, SEP, END, ALL_END)


def served_with(folder: Path, template: str, special: tuple[str, ...] = ()) -> Served:
    """A front whose model has this template, and `special` for special tokens; no engine is behind it."""
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    tags = special or ("<think>", "</think>", "<tool_call>", "</tool_call>")
    write_tokenizer(folder, 320, template, tags)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] |= token["content"] in special
    file.write_text(json.dumps(content), encoding="utf-8")
    llm: Any = SimpleNamespace(
        tokenizer=Tokenizer(folder), info=SimpleNamespace(tool_parser=None, reasoning_parser=None, vocab_size=320)
    )
    return Served(llm, ServerSettings(("m",)), Metrics())


def form_of(served: Served, **body: Any) -> ChatForm:
    request = msgspec.convert({"messages": [{"role": "user", "content": "Hi"}], **body}, ChatRequest)
    params = SamplingParams(structured_outputs={"regex": "a"} if "response_format" in body else None)
    return asyncio.run(make_form(served, request, conversation.plain_messages(request.messages), params))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served_with(tmp_path_factory.mktemp("qwen"), TEMPLATE)


def test_tags_that_are_special_tokens_stay_in_the_text(tmp_path: Path) -> None:
    served = served_with(tmp_path, TEMPLATE.replace("<tool_call>", CALL), DEEPSEEK_TAGS)
    form = form_of(served, tools=TOOLS)
    assert form.tools is DeepSeekParser
    assert not form.params.skip_special_tokens
    assert form_of(served).params.skip_special_tokens
    spec = form_of(served, tools=TOOLS, tool_choice="required").params.structured_outputs or {}
    ids = [served.special_tokens[tag] for tag in DEEPSEEK_TAGS]
    assert all(f"<[{token}]>" in spec["grammar"] for token in ids)
    assert served.llm.tokenizer is not None
    served.llm.tokenizer.grammars(320, (319,)).compile(spec)


def test_where_an_answer_begins_and_what_limits_it(qwen: Served) -> None:
    plain = form_of(qwen)
    assert (plain.reasoning, plain.begin, plain.tools) == (ThinkParser, Begin.UNKNOWN, None)
    assert form_of(qwen, enable_thinking=False).begin is Begin.AFTER
    assert form_of(qwen, tools=TOOLS).begin is Begin.AFTER
    assert form_of(qwen, tools=TOOLS).tools is HermesParser
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>so", "prefix": True}]
    assert form_of(qwen, messages=begun).begin is Begin.INSIDE
    schema = {"type": "json_object"}
    start, end = qwen.tag_ids("<think>"), qwen.tag_ids("</think>")
    assert form_of(qwen, response_format=schema).params.structured_outputs == {
        "regex": "a",
        "after": end,
        "opens": start,
    }
    inside = form_of(qwen, response_format=schema, messages=begun).params.structured_outputs
    assert inside == {"regex": "a", "after": end}
    off = form_of(qwen, response_format=schema, enable_thinking=False).params.structured_outputs
    assert off == {"regex": "a"}


def test_unknown_names_for_the_template_are_left_out(qwen: Served) -> None:
    form = form_of(qwen, chat_template_kwargs={"no_such_name": 1, "enable_thinking": False})
    assert form.text.endswith("</think>\n\n")
