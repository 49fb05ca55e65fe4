"""The tokenizer of a model directory: texts of single tokens, and what a chat template can be asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rapid_infer.errors import RequestError
from rapid_infer.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% generation %}{% set done = true %}{% endgeneration %}"
    "{% if tools %}{{ tools | length }} tools {% endif %}"
    "{% if add_generation_prompt %}a:{% if enable_thinking is false %}-{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "go"}]


def make(path: Path, *, template: str | None = TEMPLATE) -> Tokenizer:
    """SentencePiece style: a marker is a space but at the beginning, and other characters are bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["</s>", "▁", "▁hi", "hi", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template).save_pretrained(path)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("tokenizer"))


def chat(tokenizer: Tokenizer, messages: Any = MESSAGES, **options: Any) -> str:
    ids = tokenizer.encode_chat(messages, **options)
    assert all(type(token) is int for token in ids)
    return tokenizer._tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("piece", "text"), [("▁hi", " hi"), ("hi", "hi"), ("▁", " "), ("</s>", "</s>"), ("<0x41>", "A"), ("<0xE2>", "�")]
)
def test_a_token_s_text_has_the_space_it_begins_with(tokenizer: Tokenizer, piece: str, text: str) -> None:
    assert tokenizer.token_text(tokenizer._tokenizer.convert_tokens_to_ids(piece)) == text


def test_the_texts_of_an_answer_s_tokens_are_the_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi hi there")
    assert "".join(map(tokenizer.token_text, ids)) == "hi hi there"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "u:hi</s>a:go</s>a:"),
        ({"add_generation_prompt": True}, "u:hi</s>a:go</s>a:"),
        ({"add_generation_prompt": False}, "u:hi</s>a:go</s>"),
        ({"continue_final_message": True}, "u:hi</s>a:go"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "u:hi</s>a:go"),
        ({"continue_final_message": False}, "u:hi</s>a:go</s>a:"),
        ({"enable_thinking": False}, "u:hi</s>a:go</s>a:-"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "u:hi</s>a:go</s>a:-"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}, "u:hi</s>a:go</s>a:"),
        ({"chat_template_kwargs": None, "enable_thinking": True}, "u:hi</s>a:go</s>a:"),
        ({"eos_token": "!"}, "u:hi!a:go!a:"),
        ({"tools": [{"name": "f"}]}, "u:hi</s>a:go</s>1 toolsa:"),
        ({"chat_template": "{{ messages[0].content }}{{ more }}", "more": "!"}, "hi!"),
    ],
    ids=str,
)
def test_what_a_template_is_asked_for(tokenizer: Tokenizer, options: dict[str, Any], text: str) -> None:
    assert chat(tokenizer, **options).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"enable_thinkin": False}, ["'enable_thinkin'", "did you mean 'enable_thinking'", "It reads", "tools"]),
        ({"chat_template_kwargs": {"reasoning": 1}}, ["'reasoning'", "It reads"]),
        ({"documents": []}, ["'documents'"]),
        ({"chat_template": "{{ messages[0].content }}", "tools": []}, ["'tools'", "It reads nothing but the messages"]),
        ({"done": True}, ["'done'"]),
        ({"truncation": True}, ["'truncation'"]),
        ({"tokenize": False}, ["'tokenize'"]),
        ({"max_tokens": 5}, ["sampling_params=SamplingParams(max_tokens=...)"]),
        ({"continue_final_message": True, "add_generation_prompt": True}, ["at most one"]),
        ({"add_generation_prompt": "false"}, ["add_generation_prompt must be True or False, got 'false'"]),
        ({"continue_final_message": 1}, ["continue_final_message must be True or False, got 1"]),
        ({"chat_template_kwargs": ["enable_thinking"]}, ["chat_template_kwargs must be a dict"]),
        ({"chat_template": "{% if %}"}, ["the chat template refused the messages", "TemplateSyntaxError"]),
    ],
    ids=str,
)
def test_what_no_template_knows_is_refused(tokenizer: Tokenizer, options: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat(MESSAGES, **options)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("messages", ["hi", b"hi", {"role": "user", "content": "hi"}, ["hi"], [["hi"]], 5, None, []])
def test_a_conversation_is_a_list_of_messages(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"a conversation is a list|a message is a dict|is empty: got 0"):
        tokenizer.encode_chat(messages)


def test_a_tokenizer_without_a_template_takes_one(tmp_path: Path) -> None:
    plain = make(tmp_path, template=None)
    with pytest.raises(RequestError, match="no chat template"):
        plain.encode_chat(MESSAGES)
    assert chat(plain, chat_template="{{ messages[1].content }}") == "go"


def test_of_several_templates_the_one_for_tools_knows_tools(tmp_path: Path) -> None:
    several = make(tmp_path)
    several._tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }}"}
    assert (chat(several), chat(several, tools=[{}, {}])) == ("hi", "2")


@pytest.mark.parametrize("text", [json.loads('"a\\ud83d"'), "\udcff", "ok \ude00\ud83d"])
def test_half_a_surrogate_pair_is_named(tokenizer: Tokenizer, text: str) -> None:
    said = [{"role": "user", "content": text}]
    for call, given in ((tokenizer.encode, text), (tokenizer.encode_all, ["a", text]), (tokenizer.encode_chat, said)):
        with pytest.raises(RequestError, match=r"the prompt has the lone surrogate '\\ud.*at character \d"):
            call(given)
    assert text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
