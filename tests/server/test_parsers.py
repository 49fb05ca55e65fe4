"""What parsers give depends on the text alone: transcripts are split at every position, and into single characters."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.server.parsers import (
    TOOL_PARSERS,
    Arguments,
    Call,
    Content,
    Delta,
    Reasoning,
    ThinkParser,
    choose_reasoning,
    choose_tools,
    merged,
)
from rapid_infer.server.parsers.json_calls import DeepSeekParser, HermesParser
from rapid_infer.server.parsers.qwen3_coder import Qwen3CoderParser
from rapid_infer.server.parsers.think import Begin

SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get", "put")]
CALLS, CALL, SEP, END, ALL_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)

HERMES: dict[str, tuple[str, list[Delta]]] = {
    "prose": ("Just text.\n\n", [Content("Just text.\n\n")]),
    "nothing": ("", []),
    "one": (
        '<tool_call>\n{"name": "get", "arguments": {"city": "Pa\\"}ris", "deep": {"a": [1, {}]}}}\n</tool_call>',
        [Call(0, "get"), Arguments(0, '{"city": "Pa\\"}ris", "deep": {"a": [1, {}]}}')],
    ),
    "text and two": (
        'I look.\n\n<tool_call>{"name":"get","arguments":{}}</tool_call>\n<tool_call>\n'
        '{"name": "put", "parameters": {"days": 3}}\n</tool_call>\n',
        [Content("I look."), Call(0, "get"), Arguments(0, "{}"), Call(1, "put"), Arguments(1, '{"days": 3}')],
    ),
    "other order": (
        '<tool_call>{"arguments": {"days": 1}, "name": "get"}</tool_call>',
        [Call(0, "get"), Arguments(0, '{"days": 1}')],
    ),
    "arguments as text": (
        '<tool_call>{"name": "get", "arguments": "{\\"days\\": 1}"}</tool_call>',
        [Call(0, "get"), Arguments(0, '{"days": 1}')],
    ),
    "a tag in prose": (
        "Write `<tool_call>` and </tool_call> around <tool_call",
        [Content("Write `<tool_call>` and </tool_call> around <tool_call")],
    ),
    "no call": ('<tool_call>{"name": 3}</tool_call> x', [Content('<tool_call>{"name": 3}</tool_call> x')]),
    "cut in its head": ('<tool_call>{"name": "ge', [Content('<tool_call>{"name": "ge')]),
    "cut in its arguments": ('<tool_call>{"name": "get", "arguments": {"ci', [Call(0, "get"), Arguments(0, '{"ci')]),
    "more keys": (
        '<tool_call>{"name": "get", "arguments": {}, "id": 7}</tool_call> then',
        [Call(0, "get"), Arguments(0, "{}"), Content(" then")],
    ),
    "without its end": ('<tool_call>{"name": "get", "arguments": {}}', [Call(0, "get"), Arguments(0, "{}")]),
    "an escaped name": (
        '<tool_call>{"name": "g\\u0065t", "arguments": {}}</tool_call>',
        [Call(0, "get"), Arguments(0, "{}")],
    ),
}

CODER: dict[str, tuple[str, list[Delta]]] = {
    "prose": ("a < b and <function of x>", [Content("a < b and <function of x>")]),
    "one": (
        "Well.\n<tool_call>\n<function=get>\n<parameter=city>\nSan\nJose <b>\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        [Content("Well."), Call(0, "get"), Arguments(0, '{"city": "San\\nJose <b>", "days": 3}')],
    ),
    "no parameters": (
        "<tool_call>\n<function=get>\n</function>\n</tool_call>\n<tool_call><function=put></function></tool_call>",
        [Call(0, "get"), Arguments(0, "{}"), Call(1, "put"), Arguments(1, "{}")],
    ),
    "without its tag": (
        "<function=get>\n<parameter=deep>\n{'a'}\n</parameter>\n</function>",
        [Call(0, "get"), Arguments(0, '{"deep": "{\'a\'}"}')],
    ),
    "a tag in prose": (
        "Use <tool_call> or <function=unknown> here",
        [Content("Use <tool_call> or <function=unknown> here")],
    ),
    "noise between": (
        "<tool_call><function=get> x <y> <parameter=days>True</parameter> z</function></tool_call>",
        [Call(0, "get"), Arguments(0, '{"days": true}')],
    ),
    "cut": ("<tool_call><function=get><parameter=days>1", [Call(0, "get")]),
}

DEEPSEEK: dict[str, tuple[str, list[Delta]]] = {
    "prose": ("a <b> c", [Content("a <b> c")]),
    "V3": (
        f'Hm.\n{CALLS}{CALL}function{SEP}get\n```json\n{{"city": "A"}}\n```{END}\n'
        f"{CALL}function{SEP}put\n```json\n{{}}\n```{END}{ALL_END}",
        [Content("Hm."), Call(0, "get"), Arguments(0, '{"city": "A"}'), Call(1, "put"), Arguments(1, "{}")],
    ),
    "V3.1": (
        f'{CALLS}{CALL}get{SEP}{{"days": 1}}{END}{CALL}put{SEP}{{}}{END}{ALL_END}',
        [Call(0, "get"), Arguments(0, '{"days": 1}'), Call(1, "put"), Arguments(1, "{}")],
    ),
    "prose after a tag": (f"{CALL} is a tag", [Content(f"{CALL} is a tag")]),
}

THINK: dict[str, tuple[Begin, str, list[Delta]]] = {
    "none": (Begin.UNKNOWN, "Hello <think> x</think>", [Content("Hello <think> x</think>")]),
    "its own": (Begin.UNKNOWN, "\n<think>\nwell\n\nso\n</think>\n\nHi\n", [Reasoning("well\n\nso"), Content("Hi\n")]),
    "open": (Begin.INSIDE, "\nwell</think>Hi </think>", [Reasoning("well"), Content("Hi </think>")]),
    "open and cut": (Begin.INSIDE, "well < 3 </thi", [Reasoning("well < 3 </thi")]),
    "off": (Begin.AFTER, " <think>x</think>", [Content(" <think>x</think>")]),
    "a beginning": (Begin.UNKNOWN, " <thi", [Content(" <thi")]),
    "empty": (Begin.UNKNOWN, "<think>\n\n</think>\n\nHi", [Content("Hi")]),
    "white space": (Begin.UNKNOWN, "  Hi", [Content("  Hi")]),
}


def cuts(text: str) -> Iterator[list[str]]:
    yield list(text)
    for at in range(len(text)):
        yield [text[:at], text[at:]]
    random_ = random.Random(len(text))
    for _ in range(20):
        places = sorted(random_.choices(range(len(text) + 1), k=4))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]


def check(make: Callable[[], Any], text: str, expected: list[Delta]) -> None:
    def parse(pieces: list[str]) -> list[Delta]:
        parser = make()
        deltas = [delta for piece in pieces for delta in parser.push(piece)]
        return merged([*deltas, *parser.finish()])

    assert parse([text]) == expected
    for pieces in cuts(text):
        assert parse(pieces) == expected, pieces


@pytest.mark.parametrize("name", HERMES)
def test_hermes(name: str) -> None:
    check(lambda: HermesParser(TOOLS), *HERMES[name])


@pytest.mark.parametrize("name", CODER)
def test_qwen3_coder(name: str) -> None:
    check(lambda: Qwen3CoderParser(TOOLS), *CODER[name])


@pytest.mark.parametrize("name", DEEPSEEK)
def test_deepseek(name: str) -> None:
    check(lambda: DeepSeekParser(TOOLS), *DEEPSEEK[name])


@pytest.mark.parametrize("name", THINK)
def test_think(name: str) -> None:
    begin, text, expected = THINK[name]
    check(lambda: ThinkParser(begin), text, expected)


@pytest.mark.parametrize("parser", [HermesParser, Qwen3CoderParser, DeepSeekParser])
def test_any_mixture_of_pieces_does_not_depend_on_the_cut(parser: Any) -> None:
    """Texts that no model would write, out of what the parser looks for."""
    parts = ["<tool_call>", "</tool_call>", '{"name": "get"', ', "arguments": ', "{", "}", '"', " ", "\n", "x", "<"]
    parts += ["<function=get>", "</function>", "<parameter=days>", "</parameter>", CALLS, CALL, SEP, END, "function"]
    random_ = random.Random(1)
    for _ in range(300):
        text = "".join(random_.choices(parts, k=random_.randint(1, 12)))
        whole = parser(TOOLS)
        expected = merged([*whole.push(text), *whole.finish()])
        pieces = parser(TOOLS)
        found = [delta for char in text for delta in pieces.push(char)]
        assert merged([*found, *pieces.finish()]) == expected, text


def test_text_is_shown_as_soon_as_it_is_clear() -> None:
    parser = HermesParser(TOOLS)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <tool") == []
    assert parser.push("box") == [Content(" <toolbox")]
    parser.push('<tool_call>{"name": "get", "arguments": ')
    assert parser.push('{"city": "a') == [Call(0, "get"), Arguments(0, '{"city": "a')]


def test_where_an_answer_begins() -> None:
    assert ThinkParser.begins("user: <think>\nassistant:\n<think>\n") is Begin.INSIDE
    assert ThinkParser.begins("assistant:\n<think>\n\n</think>\n\n") is Begin.AFTER
    assert ThinkParser.begins("user: <think>\nassistant:") is Begin.UNKNOWN
    assert ThinkParser.begins("assistant: <think>so I", "<think>so I") is Begin.INSIDE
    assert ThinkParser.begins("assistant: Well", "Well") is Begin.AFTER


def test_parsers_are_chosen_by_template_by_the_model_or_by_name() -> None:
    assert choose_tools("auto", "...<tool_call>...") is HermesParser
    assert choose_tools("auto", "<tool_call>\n<function=") is Qwen3CoderParser
    assert choose_tools("auto", CALL) is DeepSeekParser
    assert choose_tools("auto", "") is None
    assert choose_tools("auto", "", "hermes") is HermesParser
    assert choose_tools("none", "<tool_call>", "hermes") is None
    assert choose_reasoning("auto", "</think>") is ThinkParser
    with pytest.raises(ConfigError, match="--tool-parser must be auto, none or one of deepseek, hermes, qwen3_coder"):
        choose_tools("herms", "")
    TOOL_PARSERS.register("mine", "rapid_infer.server.parsers.json_calls:NoSuchParser")
    try:
        with pytest.raises(PluginError, match="NoSuchParser"):
            choose_tools("mine", "")
    finally:
        TOOL_PARSERS.unregister("mine")


def test_a_model_s_class_names_its_parsers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rapid_infer_qwen3.model import Qwen3ForCausalLM

    from rapid_infer import LLM

    monkeypatch.setattr(Qwen3ForCausalLM, "tool_parser", "qwen3_coder", raising=False)
    with LLM(checkpoint, device="cpu", dtype="float32") as llm:
        info = llm.engine.inputs.info
        assert (info.tool_parser, info.reasoning_parser, info.max_num_seqs) == ("qwen3_coder", None, 64)


@pytest.mark.parametrize("parser", [HermesParser, Qwen3CoderParser, DeepSeekParser])
def test_grammars_allow_what_the_parser_reads(parser: Any) -> None:
    """The grammar of a forced call accepts a call as the model would write it, and nothing else."""
    llguidance = pytest.importorskip("llguidance")
    functions = [
        {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        }
    ]
    arguments = '{"city": "A b", "days": 12}'
    texts = {
        HermesParser: f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>',
        DeepSeekParser: f"{CALLS}{CALL}get{SEP}{arguments}{END}{ALL_END}",
        Qwen3CoderParser: "<tool_call>\n<function=get>\n<parameter=city>\nA b\n</parameter>\n<parameter=days>\n12\n"
        "</parameter>\n</function>\n</tool_call>",
    }
    grammar = parser.grammar(functions, False, lambda text: json.dumps(text, ensure_ascii=False))
    tokenizer = llguidance.LLTokenizer("byte")

    def accepted(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()

    text = texts[parser]
    assert accepted(text)
    assert not accepted(text.replace("get", "put"))
    assert not accepted("x" + text)
    made = parser([{"function": functions[0]}])
    deltas = merged([*made.push(text), *made.finish()])
    assert deltas[0] == Call(0, "get")
    assert json.loads(deltas[1].text) == {"city": "A b", "days": 12}  # type: ignore[union-attr]
