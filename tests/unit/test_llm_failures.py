"""The same failures seen by a user of `LLM` and `LLMEngine`, with a tiny real model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer import LLM, SamplingParams
from rapid_infer.errors import ConfigError, EngineDeadError, RequestError
from rapid_infer.llm_engine import LLMEngine
from rapid_infer.testing import TINY, make_checkpoint

PROMPT = list(range(40))
GREEDY = SamplingParams(temperature=0, max_tokens=6)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "max_model_len": 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import Qwen3Config

    folder: Path = make_checkpoint(tmp_path_factory.mktemp("model"), Qwen3Config(**TINY, head_dim=16))
    return str(folder)


@pytest.fixture
def llm(path: str) -> Iterator[LLM]:
    with LLM(path, **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    (output,) = llm.generate(prompt, GREEDY)
    return output.outputs[0].token_ids


def is_idle(llm: LLM) -> bool:
    core = llm.engine.core
    core.check_integrity()
    return not llm.engine.has_unfinished_requests() and core.cache.num_free == core.cache.num_usable


def break_forward(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException, at_layer: int = 1) -> None:
    """The forward pass raises in the middle, with the first layers' keys written and the others' not."""
    layer = list(llm.engine.executor.runner.model.layers)[at_layer]

    def forward(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(layer, "forward", forward)


def test_a_forward_that_raises_ends_its_requests_with_the_cause(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        break_forward(llm, patch, RuntimeError("out of luck"))
        (output,) = llm.generate(PROMPT, GREEDY)
    completion = output.outputs[0]
    assert completion.finish_reason == "error"
    assert completion.error == "the forward pass raised RuntimeError: out of luck"
    assert is_idle(llm)
    (output,) = llm.generate(PROMPT, GREEDY)
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (0, expected)


def test_after_an_interrupt_the_same_prompt_gives_the_same_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        break_forward(llm, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY)
    assert tokens(llm) == expected
    assert is_idle(llm)


def test_non_finite_logits_end_only_their_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    good = PROMPT[5:20]
    expected = tokens(llm, good)
    head = llm.engine.executor.runner.model.head
    original = head.argmax

    def argmax(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = original(hidden)
        value[1:2] = float("nan")
        return value, index

    monkeypatch.setattr(head, "argmax", argmax)
    first, second = llm.generate([good, PROMPT], GREEDY)
    assert first.outputs[0].token_ids == expected
    assert second.outputs[0].finish_reason == "error"
    assert "non-finite" in str(second.outputs[0].error)
    assert is_idle(llm)


def test_a_lost_device_is_reported_as_itself_now_and_later(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    break_forward(llm, monkeypatch, RuntimeError("device lost"))
    monkeypatch.setattr(llm.engine.executor, "healthy", lambda: False)
    for message in ("cannot go on: the forward pass raised RuntimeError: device lost", "the engine is dead"):
        with pytest.raises(EngineDeadError, match=message):
            llm.generate(PROMPT, GREEDY)


def test_one_bad_request_in_a_batch_leaves_nothing_behind(llm: LLM) -> None:
    for bad in ([], [10**6], PROMPT * 2):
        with pytest.raises(RequestError):
            llm.generate([PROMPT, bad], GREEDY)
        assert is_idle(llm)
    with pytest.raises(RequestError, match="got 1 sampling_params for 2 prompts"):
        llm.generate([PROMPT, PROMPT], [GREEDY])
    assert is_idle(llm)
    assert len(tokens(llm)) == 6


def test_a_stream_left_early_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, GREEDY):
        break
    assert tokens(llm)
    assert is_idle(llm)


def test_a_discarded_id_can_be_used_again_at_once(path: str) -> None:
    engine = LLMEngine(path, **OPTIONS)
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=6, n=2))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", PROMPT)
    engine.step()
    engine.discard(["a"])
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=3, n=3))
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    assert last is not None
    assert [(len(c.token_ids), c.finish_reason) for c in last.outputs] == [(3, "length")] * 3


def test_an_unknown_argument_is_refused_with_a_near_match() -> None:
    with pytest.raises(ConfigError, match="unknown argument 'max_num_seq': did you mean 'max_num_seqs'"):
        LLM("nowhere", max_num_seq=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "int8"), ("block_size", 0), ("max_num_seqs", -1), ("queue_depth", 3), ("gpu_memory_utilization", 0.0)],
)
def test_a_bad_argument_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {value!r}"):
        LLM("nowhere", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("n", 0),
        ("max_tokens", 0),
        ("seed", 2**63),
        ("seed", "1"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["x"]),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} must be "):
        SamplingParams(**{name: value})


def test_an_unknown_sampling_parameter_is_refused_with_a_near_match() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature': did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})
