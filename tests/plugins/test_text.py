"""Text end to end: stop strings over token borders, stop tokens, one BOS, and the model's own sampling defaults."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from rapid_infer import SamplingParams
from rapid_infer.outputs import RequestOutputKind

LENGTH = 40
PIECES = ["a", "b", "c", "Ġ", "ab", "Ġc", "bc", "Ã©", "Ã", "©", "âĺĥ", "âĺ", "ĥ"]
"""Tokens to write with: letters, pairs, é and ☃ whole and in parts. The random model makes broken characters too."""

BOS = 262
PROMPTS = ["abc", "a☃ b", "cab cab é", "ccc"]


def byte_tokenizer(path: Path, bos: bool = False) -> None:
    """One token per byte but for a few pairs, two special tokens, and a chat template that writes BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "c"), ("b", "c"), ("Ã", "©"), ("â", "ĺ"), ("âĺ", "ĥ")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *map("".join, merges), "<s>", "</s>"])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    wrapped.save_pretrained(path)


@pytest.fixture(scope="module")
def path(tiny, tmp_path_factory) -> Path:
    model = tiny("llama", {"vocab_size": 264})
    path = Path(shutil.copytree(model.path, tmp_path_factory.mktemp("text") / "model"))
    byte_tokenizer(path)
    return path


@pytest.fixture
def open_text(path, open_llm):
    return lambda **options: open_llm(path, skip_tokenizer_init=False, **options)


@pytest.fixture
def params(open_text):
    backend = open_text().engine.tokenizer._tokenizer.backend_tokenizer
    allowed = tuple(backend.token_to_id(piece) for piece in PIECES)
    plain = {"temperature": 1.0, "seed": 3, "max_tokens": LENGTH, "allowed_token_ids": allowed}
    return lambda **values: SamplingParams(**{**plain, **values})


def finished_text(llm: Any, prompt: str, tokens: list[int]) -> str:
    """What is sure after these tokens: no character that more bytes may change."""
    whole = llm.engine.tokenizer.decode(llm.engine.tokenizer.encode(prompt) + tokens)
    return whole[len(prompt) :].rstrip("�")


def wanted(
    llm: Any, prompt: str, tokens: list[int], stops: tuple[str, ...], min_tokens: int = 0
) -> tuple[int, str, str] | None:
    """How many tokens it takes, where the text is cut, and by what; by looking at the text after every token."""
    for count in range(min_tokens + 1, len(tokens) + 1):
        before, after = (finished_text(llm, prompt, tokens[:n]) for n in (count - 1, count))
        for end in range(len(before) + 1, len(after) + 1):
            ending = [stop for stop in stops if after[:end].endswith(stop)]
            if ending:
                stop = max(ending, key=len)
                return count, after[: end - len(stop)], stop
    return None


def random_stops(text: str, rng: random.Random) -> tuple[str, ...]:
    """Pieces of the text, and one that is not in it."""
    found = ["never"]
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(3, len(text) - 5)
        found.append(text[at : at + rng.randint(2, 5)])
    return tuple(stop for stop in found if "�" not in stop)


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_strings_end_a_request_where_the_text_says(depth, open_text, params):
    llm = open_text(queue_depth=depth)
    rng = random.Random(depth)
    free = llm.generate(PROMPTS, params())
    texts = [output.outputs[0].text for output in free]
    cases = []
    for n in range(40):
        i = n % len(PROMPTS)
        stops = random_stops(texts[i], rng)
        tokens = free[i].outputs[0].token_ids
        first = wanted(llm, PROMPTS[i], tokens, stops)
        min_tokens = rng.choice([0, 5, first[0] - 1, first[0]]) if first else 0
        assert "☃" in texts[i]
        assert "é" in texts[i]
        cases.append((i, params(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=n % 3 == 0), tokens))
    outputs = llm.generate([PROMPTS[i] for i, _, _ in cases], [one for _, one, _ in cases])
    ended = 0
    for output, (i, one, tokens) in zip(outputs, cases):
        found, got = wanted(llm, PROMPTS[i], tokens, one.stop, one.min_tokens), output.outputs[0]
        if found is None:
            assert (got.token_ids, got.text) == (tokens, texts[i])
            assert (got.finish_reason, got.stop_reason) == ("length", None)
            continue
        ended += 1
        count, text, stop = found
        assert got.token_ids == tokens[:count]
        assert got.text == text + (stop if one.include_stop_str_in_output else "")
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        streamed = list(llm.stream(PROMPTS[i], one))
        assert "".join(piece.outputs[0].text for piece in streamed) == got.text
        assert [token for piece in streamed for token in piece.outputs[0].token_ids] == got.token_ids
        assert (streamed[-1].outputs[0].finish_reason, streamed[-1].outputs[0].stop_reason) == ("stop", stop)
        shown = ""
        for piece in streamed:
            shown += piece.outputs[0].text
            assert text.startswith(shown) or one.include_stop_str_in_output
    assert 10 < ended < 40


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_stops_working_on_what_a_stop_string_has_ended(depth, open_text, params):
    llm = open_text(queue_depth=depth, block_size=4, enable_prefix_caching=False)
    core = llm.engine.core
    text = llm.generate(PROMPTS[0], params())[0].outputs[0].text
    steps = core.scheduler.stats.steps
    output = llm.generate(PROMPTS[0], params(stop=text[6:9], max_tokens=400))[0].outputs[0]
    assert output.finish_reason == "stop"
    assert not core.scheduler.running
    while core.has_unfinished_requests():
        core.step()
    assert core.cache.num_free == core.cache.num_usable
    assert core.scheduler.stats.steps - steps <= len(output.token_ids) + depth - 1


def test_stop_strings_and_completions_end_one_by_one(open_text, params):
    llm = open_text(queue_depth=2)
    [free] = llm.generate(PROMPTS[0], params(n=4))
    stop = free.outputs[2].text[7:10]
    [output] = llm.generate(PROMPTS[0], params(n=4, stop=stop, logprobs=1))
    assert output.outputs[2].finish_reason == "stop"
    for got, whole in zip(output.outputs, free.outputs):
        found = wanted(llm, PROMPTS[0], whole.token_ids, (stop,))
        assert (got.text, len(got.logprobs)) == ((found[1], found[0]) if found else (whole.text, LENGTH))


def test_cached_tokens_are_reported_however_a_request_ends(open_text, params):
    llm = open_text(block_size=4)
    prompt = "abc" * 8
    text = llm.generate(prompt, params())[0].outputs[0].text
    cached = [llm.generate(prompt, params(**end))[0].num_cached_tokens for end in ({}, {"stop": text[4:6]})]
    assert cached[0] == cached[1] > 0
    assert [piece.num_cached_tokens for piece in llm.stream(prompt, params())] == cached[:1] * LENGTH


@pytest.mark.parametrize("stop", [None, "zzz"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_no_part_of_the_text_unless_asked_for(include, stop, open_text, params):
    llm = open_text()
    [free] = llm.generate(PROMPTS[0], params())
    token = next(t for t in free.outputs[0].token_ids[5:] if t < 128)
    count = free.outputs[0].token_ids.index(token) + 1
    one = params(stop_token_ids=[token], include_stop_str_in_output=include, stop=stop)
    got = llm.generate(PROMPTS[0], one)[0].outputs[0]
    assert (got.token_ids, got.finish_reason, got.stop_reason) == (free.outputs[0].token_ids[:count], "stop", token)
    text = llm.engine.tokenizer.decode(got.token_ids if include else got.token_ids[:-1])
    assert got.text == text
    assert "".join(piece.outputs[0].text for piece in llm.stream(PROMPTS[0], one)) == text
    llm.engine.add_request("c", PROMPTS[0], one, output_kind=RequestOutputKind.CUMULATIVE)
    while llm.engine.has_unfinished_requests():
        last = llm.engine.step()
    assert last[0].outputs[0].text == text


def test_special_tokens_are_shown_when_asked_for(open_text, params):
    llm = open_text()
    special = llm.engine.tokenizer.encode("<s>")[0]
    for skip, text in ((True, ""), (False, "<s>" * 3)):
        one = params(allowed_token_ids=[special], max_tokens=3, skip_special_tokens=skip, logprobs=0)
        got = llm.generate("a", one)[0].outputs[0]
        assert got.text == text
        assert got.logprobs[0][special].decoded_token == "<s>"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_is_a_special_token_ends_the_text(include, skip, open_text, params):
    llm = open_text()
    options = {"allowed_token_ids": None, "logit_bias": {BOS: 6.0}, "include_stop_str_in_output": include}
    options |= {"skip_special_tokens": skip, "ignore_eos": True}
    free = llm.generate(PROMPTS[0], params(**options))[0].outputs[0].token_ids
    assert free.count(BOS) > 1
    first = free.index(BOS)
    for stop, extra, reason in ((["never", "<s>"], {}, "<s>"), ("<s>", {"stop_token_ids": [BOS]}, BOS)):
        one = params(**options, stop=stop, **extra)
        got = llm.generate(PROMPTS[0], one)[0].outputs[0]
        text = llm.engine.tokenizer._tokenizer.decode(free[:first]) + "<s>" * include
        assert (got.token_ids, got.text) == (free[: first + 1], text)
        assert (got.finish_reason, got.stop_reason) == ("stop", reason if skip else got.stop_reason)
        streamed = list(llm.stream(PROMPTS[0], one))
        assert "".join(piece.outputs[0].text for piece in streamed) == text
        assert streamed[-1].outputs[0].stop_reason == got.stop_reason
    later = llm.generate(PROMPTS[0], params(**options, stop="<s>", min_tokens=first + 2))[0].outputs[0]
    assert later.stop_reason == "<s>"
    assert later.token_ids.index(BOS, first) == (len(later.token_ids) - 1 if skip else first)
    assert len(later.token_ids) > first + 2


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_prompt_has_one_bos(adds_bos, path, open_llm, tmp_path):
    byte_tokenizer(Path(shutil.copytree(path, tmp_path / "model")), bos=adds_bos)
    llm = open_llm(tmp_path / "model", skip_tokenizer_init=False)
    bos = llm.engine.tokenizer.encode("<s>a").index(BOS)
    one = SamplingParams(max_tokens=1)
    messages = [{"role": "user", "content": "a"}]
    plain, with_text, chat = (
        llm.generate("a", one)[0].prompt_token_ids,
        llm.generate("<s>a", one)[0].prompt_token_ids,
        llm.chat(messages, one)[0].prompt_token_ids,
    )
    assert bos == 0
    assert plain == [BOS] * adds_bos + with_text[1:]
    assert [ids.count(BOS) for ids in (plain, with_text, chat)] == [int(adds_bos), 1, 1]
    assert chat == llm.generate("<s>user: a", one)[0].prompt_token_ids


def test_defaults_come_from_the_model_field_by_field(path, open_llm, tmp_path):
    model = Path(shutil.copytree(path, tmp_path / "model"))
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2, "max_new_tokens": 9}
    (model / "generation_config.json").write_text(json.dumps(settings))
    llm = open_llm(model, skip_tokenizer_init=False)
    fields = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2}
    assert llm.default_sampling_params() == SamplingParams(**fields, max_tokens=9)
    changed = llm.default_sampling_params(top_k=0, stop="x", max_tokens=None)
    assert changed == SamplingParams(**{**fields, "top_k": 0}, stop=("x",), max_tokens=None)
    params = SamplingParams(**fields, max_tokens=9)
    without, given, other = (
        [output.outputs[0].token_ids for output in open_llm(model, skip_tokenizer_init=False).generate(PROMPTS, p)]
        for p in (None, params, SamplingParams(max_tokens=9))
    )
    assert without == given != other
    streamed = open_llm(model, skip_tokenizer_init=False).stream(PROMPTS[0])
    assert [token for piece in streamed for token in piece.outputs[0].token_ids] == given[0]
