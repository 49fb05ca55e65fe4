"""`rapid-infer generate`: how options meet the model's own defaults, and what the JSON report holds."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_chat import Run, make_chat_model, make_run

from rapid_infer.cli.generate import MAX_TOKENS
from rapid_infer.cli.options import sampling_params
from rapid_infer.llm_engine import LLMEngine
from rapid_infer.params import SamplingParams, defaults_of
from rapid_infer.text import Tokenizer

CPU = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def careful(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same weights; its authors recommend short greedy answers."""
    generation = {"do_sample": False, "temperature": 0.9, "max_new_tokens": 5}
    return make_chat_model(tmp_path_factory.mktemp("careful"), generation=generation)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


def completions(run: Run, model: str, *args: str, prompt: str = "Hello") -> list[dict[str, Any]]:
    code, out, err = run("generate", model, "-p", prompt, "--json", *CPU, *args)
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    return result["outputs"]


def tokens(run: Run, model: str, *args: str) -> list[int]:
    return completions(run, model, *args)[0]["token_ids"]


def test_what_is_not_given_comes_from_the_model(run: Run, model: str, careful: str) -> None:
    greedy = tokens(run, model, "--greedy", "--max-tokens", "5")
    assert tokens(run, careful) == greedy
    assert len(tokens(run, careful, "--max-tokens", "7")) == 7
    assert tokens(run, careful, "--max-tokens", "7")[:5] == greedy
    varied = tokens(run, careful, "--temperature", "2", "--seed", "1")
    assert len(varied) == 5
    assert varied != greedy
    assert tokens(run, careful, "--temperature", "2", "--greedy") == greedy


def test_without_a_recommendation_it_is_256_tokens_at_temperature_1() -> None:
    def defaults(**generation: Any) -> SamplingParams:
        engine: Any = SimpleNamespace(
            checkpoint=SimpleNamespace(generation=generation),
            default_sampling_params=lambda **changes: SamplingParams.from_dict({**defaults_of(generation), **changes}),
        )
        return sampling_params(engine, {}, MAX_TOKENS)

    assert defaults() == SamplingParams(max_tokens=256)
    assert defaults(top_k=20) == SamplingParams(max_tokens=256, top_k=20)
    assert defaults(max_new_tokens=7) == SamplingParams(max_tokens=7)


def test_every_sampling_option_has_its_effect(run: Run, model: str) -> None:
    short = ("--seed", "1", "--max-tokens", "24")
    greedy = tokens(run, model, *short, "--greedy")
    for narrow in (["--min-p", "1"], ["--top-k", "1"], ["--top-p", "0.0001"]):
        assert tokens(run, model, *short, *narrow) == greedy
    for penalty in (["--repetition-penalty", "1000"], ["--presence-penalty", "2"], ["--frequency-penalty", "2"]):
        assert tokens(run, model, *short, "--greedy", *penalty) != greedy


def test_stop_texts_end_the_text_and_are_named(run: Run, model: str) -> None:
    whole = completions(run, model, "--greedy", "--max-tokens", "40")[0]
    readable = [i for i, token in enumerate(whole["token_ids"]) if 32 < token < 127]
    character = chr(whole["token_ids"][readable[0]])
    assert whole["stop_reason"] is None

    cut = completions(run, model, "--greedy", "--max-tokens", "40", "--stop", "not there", "--stop", character)[0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", character)
    assert cut["text"] == whole["text"].partition(character)[0]
    least = ("--min-tokens", str(len(cut["token_ids"]) + 1))
    later = completions(run, model, "--greedy", "--max-tokens", "40", "--stop", character, *least)[0]
    assert len(later["token_ids"]) > len(cut["token_ids"])


def test_log_probabilities_are_in_the_report(run: Run, model: str) -> None:
    found = completions(run, model, "--logprobs", "3", "-n", "2", "--max-tokens", "6", "--seed", "5")
    assert len(found) == 2
    for completion in found:
        rows = completion["logprobs"]
        assert [row["token_id"] for row in rows] == completion["token_ids"]
        assert sum(row["logprob"] for row in rows) == pytest.approx(completion["cumulative_logprob"])
        for row in rows:
            assert set(row) == {"token_id", "token", "logprob", "rank", "top"}
            assert [entry["rank"] for entry in row["top"]] == [1, 2, 3]
            likeliest = [entry["logprob"] for entry in row["top"]]
            assert likeliest == sorted(likeliest, reverse=True)
            assert (row["rank"] <= 3) == (row["token_id"] in [entry["token_id"] for entry in row["top"]])
    assert any(row["rank"] > 3 for completion in found for row in completion["logprobs"])
    alone = completions(run, model, "--logprobs", "0", "--max-tokens", "2", "--greedy")[0]
    assert [(row["rank"], row["top"]) for row in alone["logprobs"]] == [(1, []), (1, [])]
    assert "logprobs" not in completions(run, model, "--max-tokens", "2")[0]


def test_chat_and_text_on_standard_output(run: Run, model: str) -> None:
    code, out, err = run("generate", model, "-p", "Hello", "--chat", "--greedy", "--max-tokens", "4", *CPU)
    answer = completions(run, model, "--chat", "--greedy", "--max-tokens", "4")[0]["text"]
    assert (code, out) == (0, f"{answer}\n")
    assert err.startswith("4 tokens in ")


def test_the_chat_template_gets_system_message_and_thinking(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encode = Tokenizer.encode_chat

    def spy(self: Tokenizer, messages: Any, **template: Any) -> list[int]:
        ids = encode(self, messages, **template)
        seen.append(bytes(ids).decode())
        return ids

    monkeypatch.setattr(Tokenizer, "encode_chat", spy)
    for args in ([], ["--system", "Be kind"], ["--no-thinking"], ["--system", "", "--no-thinking"]):
        completions(run, model, "--chat", "--max-tokens", "1", *args, prompt="Hi")
    assert seen == ["u:Hi\na:", "s:Be kind\nu:Hi\na:", "u:Hi\na:-", "s:\nu:Hi\na:-"]


def test_stop_token_ids_end_the_text(run: Run, model: str) -> None:
    whole = tokens(run, model, "--greedy", "--max-tokens", "9")
    stop = next(token for token in whole[1:] if token != whole[0])
    for ids in (["--stop-token-ids", f"0,{stop}"], ["--stop-token-ids", "0", "--stop-token-ids", str(stop)]):
        cut = completions(run, model, "--greedy", "--max-tokens", "9", *ids)[0]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
        assert cut["token_ids"] == whole[: whole.index(stop) + 1]


LINES = "a\u2028b\x0bc\x0cd\x85e\rf\r\n\n  \ng\n"
"""Nothing but a line feed, or both characters of Windows, ends a line."""


@pytest.mark.parametrize("source", ["file", "standard input"])
@pytest.mark.parametrize(
    ("args", "prompts"),
    [
        (["--lines"], ["a\u2028b\x0bc\x0cd\x85e\rf", "g"]),
        ([], ["a\u2028b\x0bc\x0cd\x85e\rf\n\n  \ng"]),
    ],
)
def test_lines_of_a_file(
    run: Run,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    args: list[str],
    prompts: list[str],
) -> None:
    content = LINES.encode("utf-8-sig")
    if source == "file":
        (tmp_path / "prompts.txt").write_bytes(content)
        args = ["-p", "first\nprompt", "-f", str(tmp_path / "prompts.txt"), *args]
        prompts = ["first\nprompt", *prompts]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"))
    code, out, err = run("generate", model, "--json", "--max-tokens", "1", *CPU, *args)
    assert code == 0, err
    assert [result["prompt"] for result in json.loads(out)["results"]] == prompts


def test_what_is_no_text_is_one_error(run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    for name, args in {
        "standard input": [],
        f"the prompt file {tmp_path}/latin1.txt": ["-f", f"{tmp_path}/latin1.txt"],
    }.items():
        assert run("generate", model, *args) == (
            2,
            "",
            f"error: cannot read {name}: byte 3 is not UTF-8; save it as UTF-8\n",
        )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--top-p", "7"], "top_p must be a number in (0, 1], got 7.0"),
        (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens=9 is more than max_tokens=3"),
        (["--stop", ""], "stop must be a text or a list of non-empty texts"),
        (["--logprobs", "99", "--json"], "logprobs must be an integer from 0 to 20"),
        (["--logprobs", "2"], "add --json"),
        (["--system", "Be kind"], "--system is for the chat template, which a plain prompt does not go through; add"),
        (
            ["--no-thinking"],
            "--no-thinking is for the chat template, which a plain prompt does not go through; add --c",
        ),
        (["--stop-token-ids", "2,x"], "--stop-token-ids must be token ids such as 2 or 2,5, got '2,x'"),
        (["--stop-token-ids", "-1"], "stop_token_ids must be a list of at most 128 token ids >= 0, got (-1,)"),
        (["--lines"], "--lines is for the lines of -f, and -p is one prompt whatever it holds; drop --lines"),
        (["-f", "nosuch.txt"], "cannot read the prompt file nosuch.txt: No such file or directory"),
        (["-f", "/"], "cannot read the prompt file /: Is a directory"),
    ],
)
def test_mistakes_show_before_a_model_is_loaded(run: Run, tmp_path: Path, args: list[str], message: str) -> None:
    code, out, err = run("generate", str(tmp_path / "absent"), "-p", "Hello", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_interrupt_leaves_the_text_that_there_is(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = completions(run, model, "--greedy", "--max-tokens", "9")[0]
    step, steps = LLMEngine.step, iter(range(4))

    def interrupted(self: LLMEngine) -> Any:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    code, out, err = run("generate", model, "-p", "Hello", "--greedy", "--max-tokens", "9", *CPU)
    assert (code, err) == (130, "")
    assert out.endswith("\n")
    assert whole["text"].startswith(out[:-1])


@pytest.mark.parametrize("command", ["generate", "chat", "inspect"])
def test_offline_names_what_is_missing(command: str, tmp_path: Path) -> None:
    """In a process of its own: the option holds for all of it."""
    environment = {**os.environ, "RAPID_INFER_CACHE": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    arguments = [sys.executable, "-m", "rapid_infer.cli", command, "ms:no/such", "--offline"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, input="hi", check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model 'ms:no/such': offline, and it is not in the cache; run `rapid-infer")
