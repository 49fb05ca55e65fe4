"""Outputs in a given form, without a server: offline, in the engine process, and after a model's thinking."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid_infer import LLM, AsyncLLM, SamplingParams
from rapid_infer.errors import RequestError
from rapid_infer.text import GrammarCompiler, Tokenizer

VOCAB = 320
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return tokenizer.grammars(VOCAB, tokenizer.stop_token_ids)


def allowed(bits: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def test_offline(checkpoint: Path) -> None:
    with LLM(checkpoint, **OPTIONS) as llm:
        params = SamplingParams(seed=1, n=2, max_tokens=40, structured_outputs={"regex": "[ab]{5}c?"})
        (output,) = llm.generate("x", params)
        assert all(re.fullmatch("[ab]{5}c?", one.text) and one.finish_reason == "stop" for one in output.outputs)
        with pytest.raises(RequestError, match=r"structured_outputs: this regex cannot be used"):
            llm.generate("x", SamplingParams(structured_outputs={"regex": "(["}))
    tokenless = LLM(checkpoint, skip_tokenizer_init=True, **OPTIONS)
    with tokenless, pytest.raises(RequestError, match="structured_outputs needs the tokenizer"):
        tokenless.generate([1], params)


def test_a_model_whose_answers_nothing_ends_is_refused(tokenizer: Tokenizer) -> None:
    """Past the end of its form there would be nothing that it may say."""
    with pytest.raises(RequestError, match="needs a token that ends the text"):
        tokenizer.grammars(VOCAB, ())


@pytest.mark.parametrize(
    "value",
    [{}, {"regex": 1}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": "ab"}, {"json_object": False}, "x"]
    + [{"json": {"const": value}} for value in (2**80, object())],
)
def test_what_is_no_form(value: Any) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs must be a dict with one of the keys \(json"):
        SamplingParams(structured_outputs=value)


@pytest.mark.parametrize(
    "spec", [{"json": {"$ref": "#"}}, {"json": {"type": "x"}}, {"json": "{"}, {"grammar": "start: x"}]
)
def test_forms_that_cannot_be_kept(compiler: GrammarCompiler, spec: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs: "):
        compiler.compile(spec)


def test_a_form_holds_after_the_thinking(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    tags = tokenizer.tag_tokens
    start, end = tags["<think>"], tags["</think>"]
    a, b = tokenizer.encode("ab")
    inside = compiler.compile({"regex": "a", "after": [end]})
    assert allowed(inside.bits([])) == set(range(VOCAB))
    assert allowed(inside.bits([b])) == set(range(VOCAB))
    assert allowed(inside.bits([b, end])) == {a}
    assert allowed(inside.bits([b, end, a])) == set(tokenizer.stop_token_ids)
    perhaps = compiler.compile({"regex": "a", "after": [end], "opens": [start]})
    assert allowed(perhaps.bits([])) == {a, start}
    assert allowed(perhaps.bits([start])) == set(range(VOCAB))
    assert allowed(perhaps.bits([start, b, end])) == {a}
    without = compiler.compile({"regex": "a", "after": [end], "opens": [start]})
    assert allowed(without.bits([])) == {a, start}
    assert allowed(without.bits([a])) == set(tokenizer.stop_token_ids)


def test_a_forced_text_may_look_like_a_tag(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    mask, made = compiler.compile({"choice": ["<think>"]}), []
    for _ in range(len("<think>")):
        (token,) = allowed(mask.bits(made))
        made.append(token)
    assert tokenizer.decode(made) == "<think>"
    assert tokenizer.tag_tokens["<think>"] not in made


def test_leaving_while_a_grammar_is_compiled(checkpoint: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(checkpoint, **OPTIONS) as llm:
            params = SamplingParams(max_tokens=50, structured_outputs={"regex": "[ab]{50}"})
            first = asyncio.ensure_future(anext(llm.generate("x", params)))
            await asyncio.sleep(0)
            first.cancel()
            outputs = [one async for one in llm.generate("x", params, "again")]
            assert re.fullmatch("[ab]{50}", outputs[-1].outputs[0].text)
            bad = SamplingParams(structured_outputs={"regex": "(["})
            with pytest.raises(RequestError, match="structured_outputs"):
                await anext(llm.generate("x", bad))
            while (stats := await llm.stats()).num_running or stats.num_waiting:
                await asyncio.sleep(0.01)
            assert stats.num_free_blocks == stats.num_usable_blocks

    asyncio.run(asyncio.wait_for(run(), 60))
