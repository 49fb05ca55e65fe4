"""Whatever a user passes, it either works with the meaning it plainly has, or is one clear error that names it."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
import torch

from rapid_infer import LLM, AsyncLLM, SamplingParams
from rapid_infer.config import EngineArgs
from rapid_infer.errors import ConfigError, RapidInferError, RequestError
from rapid_infer.llm_engine import LLMEngine
from rapid_infer.testing import TINY, make_checkpoint

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "max_model_len": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=3)
PROMPT = [5, 6, 7]


class Text(enum.StrEnum):
    CPU = "cpu"


VALUES: list[Any] = [
    *(None, "", "x", "false", "1", b"x", "\udcff", True, False, 0, 1, -1, 2, 1.0, 1.5, -0.5),
    *(math.nan, math.inf, -math.inf, 10**30, -(10**30), 10**400, [], [1], ["x"], [""], [None], [[1]], (), (1, 2), {}),
    *({"x": 1}, {1: 1}, {"x": "y"}, {"x": ["y"]}, {"x": ["\udcff"]}),
    *({"x": [1]}, {1, 2}, object(), int, Text.CPU, 1j, range(3), Path("x")),
    *(np.int64(1), np.float32(0.5), np.bool_(True), np.str_("x"), np.array([1, 2]), np.array(1), np.array([0.5])),
    *(torch.tensor(1), torch.tensor([1, 2]), [np.int32(3)], {np.int64(3): np.float32(0.5)}),
]  # fmt: skip


def is_what_it_says(value: Any, hint: Any) -> bool:
    """Whether a value is Python's own and of a type that the annotation names."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    allowed = {Mapping: dict}
    types = {allowed.get(get_origin(kind), get_origin(kind)) or kind for kind in kinds}
    return type(value) in types or (isinstance(value, str) and str in types)


@pytest.mark.parametrize(
    ("cls", "name"),
    [(cls, field.name) for cls in (EngineArgs, SamplingParams) for field in dataclasses.fields(cls)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_field_takes_what_it_says_and_names_itself_in_any_other_case(cls: Any, name: str) -> None:
    error = ConfigError if cls is EngineArgs else RequestError
    hint = get_type_hints(cls)[name]
    refused = 0
    for value in VALUES:
        raised = None
        try:
            made = cls(**{name: value})
        except error as one:
            raised = one
        if raised is not None:
            assert str(raised).startswith(name)
            refused += 1
            continue
        got = getattr(made, name)
        assert is_what_it_says(got, hint), (value, got)
        assert not (isinstance(got, float) and not math.isfinite(got))
        assert cls(**{name: got}) == made
        # A process of its own has to be told.
        assert msgspec.msgpack.encode(got)
    assert refused > len(VALUES) // 2


FLAGS = [
    (cls, name) for cls in (EngineArgs, SamplingParams) for name, kind in get_type_hints(cls).items() if kind is bool
]


@pytest.mark.parametrize(("cls", "name"), FLAGS, ids=str)
def test_a_flag_is_true_or_false_and_no_text(cls: Any, name: str) -> None:
    for value in (True, False, np.bool_(True)):
        assert getattr(cls(**{name: value}), name) is bool(value)
    for value in ("false", "true", "", 0, 1, None, np.int64(1)):
        with pytest.raises(RapidInferError, match=rf"^{name} must be True or False, got "):
            cls(**{name: value})


@pytest.mark.parametrize(
    ("cls", "name", "value", "expected"),
    [
        (EngineArgs, "max_model_len", np.int64(64), 64),
        (EngineArgs, "gpu_memory_utilization", np.float32(0.5), 0.5),
        (EngineArgs, "gpu_memory_utilization", 1, 1.0),
        (EngineArgs, "op_priority", {"paged_attention": ("torch",)}, {"paged_attention": ["torch"]}),
        (SamplingParams, "temperature", np.float32(0.5), 0.5),
        (SamplingParams, "seed", np.int64(3), 3),
        (SamplingParams, "stop_token_ids", np.array([3, 4]), (3, 4)),
        (SamplingParams, "allowed_token_ids", [np.int32(3), 4], (3, 4)),
        (SamplingParams, "allowed_token_ids", torch.tensor([3]), (3,)),
        (SamplingParams, "logit_bias", {np.int64(3): np.float32(0.5)}, {3: 0.5}),
        (SamplingParams, "stop", np.array(["a", "b"]), ("a", "b")),
    ],
    ids=str,
)
def test_numbers_of_other_libraries_are_numbers(cls: Any, name: str, value: Any, expected: Any) -> None:
    assert getattr(cls(**{name: value}), name) == expected
    assert cls(**{name: value}) == cls(**{name: expected})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("seed", "x", "to 9223372036854775807, got 'x'"),
        ("seed", 2**63, "an integer from"),
        ("op_priority", {"paged_attention": "torch"}, "a dict of text to a list of text"),
        ("op_priority", "torch", "a dict of text to a list of text"),
        ("device", "", "non-empty text, got ''"),
        ("revision", "\udcff", "lone surrogate '\\udcff' at character 0"),
        ("max_num_seqs", 2**31, "an integer from 1 to 2147483647"),
        ("max_model_len", "64", "an integer from 1 to 2147483647 or None, got '64'"),
        ("gpu_memory_utilization", 0, "a number in (0, 1], got 0"),
        ("gpu_memory_utilization", 1.5, "a number in (0, 1], got 1.5"),
        ("gpu_memory_utilization", "0.9", "a number in (0, 1], got '0.9'"),
    ],
)
def test_what_an_option_expected(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(**{name: value})
    assert str(caught.value).startswith(f"{name} ")
    assert expected in str(caught.value)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config

    return make_checkpoint(tmp_path_factory.mktemp("model"), Qwen3Config(**TINY, head_dim=16))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    """Opened by a path that is no text."""
    with LLM(path, **OPTIONS) as llm:
        yield llm
        assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("model", [5, None, b"demo", "", Path("no/such"), Path("demo"), ["demo"]], ids=repr)
@pytest.mark.parametrize("cls", [LLM, LLMEngine, AsyncLLM])
def test_a_model_is_a_directory_or_a_name(cls: Any, model: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model (must be|'.*' is a path, but no directory is there)"):
        cls(model)


def same(*prompts: Any) -> list[Any]:
    return [pytest.param(prompt, id=f"{type(prompt).__name__}-{n}") for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    "prompt",
    same(
        tuple(PROMPT), np.array(PROMPT), np.array(PROMPT, np.uint8), torch.tensor(PROMPT),
        [np.int64(t) for t in PROMPT], list(torch.tensor(PROMPT)), [5, np.int32(6), torch.tensor(7)],
        range(5, 8), np.array([PROMPT]),
        [np.array(PROMPT)],
        [torch.tensor(PROMPT)], [tuple(PROMPT)], torch.tensor([PROMPT]),
    ),
)  # fmt: skip
def test_token_ids_of_any_library_are_one_prompt(llm: LLM, prompt: Any) -> None:
    (expected,) = llm.generate(PROMPT, GREEDY)
    (output,) = llm.generate(prompt, GREEDY)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.prompt_token_ids == PROMPT
    assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize("prompt", same(np.array(PROMPT), torch.tensor(PROMPT), range(5, 8)))
def test_a_stream_takes_the_same_token_ids(llm: LLM, prompt: Any) -> None:
    (expected,) = llm.generate(PROMPT, GREEDY)
    pieces = list(llm.stream(prompt, GREEDY))
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == expected.outputs[0].token_ids


def test_rows_of_an_array_are_prompts(llm: LLM) -> None:
    for batch in (np.array([PROMPT, [1, 2, 3]]), torch.tensor([PROMPT, [1, 2, 3]]), (PROMPT, np.array([1, 2, 3]))):
        assert [output.prompt_token_ids for output in llm.generate(batch, GREEDY)] == [PROMPT, [1, 2, 3]]


@pytest.mark.parametrize(
    "prompt",
    same(
        b"text", bytearray(b"text"), memoryview(b"text"), [b"text"], [5, 6.0], [5, None], [5, True], [True],
        [5, None, 6], [5, "6", 7],
        np.array([5.0]), np.array([True]), {"prompt": "text"}, {5, 6}, [{"prompt_token_ids": [5]}], 5, None, object(),
        np.array(5), [[[5]]], [5, [6]], [5, "6"],
    ),
)  # fmt: skip
def test_what_is_neither_text_nor_ids_is_refused(llm: LLM, prompt: Any) -> None:
    calls: list[Callable[[], Any]] = [lambda: llm.generate(prompt, GREEDY), lambda: next(llm.stream(prompt, GREEDY))]
    for call in calls:
        with pytest.raises(RequestError, match=r"text, token ids, or a list|must be text or a list of token ids"):
            call()


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, "greedy", 0, EngineArgs(), SamplingParams], ids=repr)
def test_sampling_parameters_are_an_object(llm: LLM, params: Any) -> None:
    for call in (
        lambda: llm.generate(PROMPT, params),
        lambda: llm.generate([PROMPT], [params]),
        lambda: next(llm.stream(PROMPT, params)),
        lambda: llm.engine.add_request("a", PROMPT, params),
    ):
        with pytest.raises(RequestError, match=r"must be SamplingParams, got .*SamplingParams\.from_dict"):
            call()


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        (5, None, "request id must be text, got 5"),
        ([], None, "request id must be text"),
        ("\ud83d", None, "the request id has the lone surrogate"),
        ("a", "delta", "output_kind must be one of RequestOutputKind.CUMULATIVE"),
    ],
)
def test_a_call_s_other_arguments(llm: LLM, name: Any, kind: Any, text: str) -> None:
    options = {} if kind is None else {"output_kind": kind}
    with pytest.raises(RequestError, match=text):
        llm.engine.add_request(name, PROMPT, GREEDY, **options)


def test_half_a_surrogate_pair_stops_nothing() -> None:
    with pytest.raises(RequestError, match="stop has the lone surrogate"):
        SamplingParams(stop=["a", "\ude00"])  # type: ignore[arg-type]
