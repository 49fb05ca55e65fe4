"""What SamplingParams accepts, what it says of what it does not, and which fields a model's file sets."""

import math
from typing import Any, get_type_hints

import pytest

from rapid_infer.errors import RequestError
from rapid_infer.frontend import EngineInfo, InputProcessor
from rapid_infer.params import MAX_LOGPROBS, SamplingParams, defaults_of

NOT_NUMBERS = (math.nan, math.inf, -math.inf, 10**400, True, "1", None)
NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
COUNTS = ("top_k", "n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs")
LISTS = ("stop", "stop_token_ids", "allowed_token_ids")

BAD: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "a number >= 0"),
    ("top_k", -2, "an integer >= 1, or 0 or -1 for off"),
    ("top_p", 0, "a number in (0, 1]"),
    ("top_p", 1.01, "a number in (0, 1]"),
    ("min_p", -0.01, "a number in [0, 1]"),
    ("min_p", 1.01, "a number in [0, 1]"),
    ("repetition_penalty", 0, "a number > 0"),
    ("repetition_penalty", -1, "a number > 0"),
    ("presence_penalty", 2.1, "a number in [-2, 2]"),
    ("frequency_penalty", -2.1, "a number in [-2, 2]"),
    ("logit_bias", {1: 100.5}, "{token id: number in [-100, 100]}"),
    ("logit_bias", {-1: 1}, "{token id: number in [-100, 100]}"),
    ("logit_bias", {2**70: 1}, "{token id: number in [-100, 100]}"),
    ("logit_bias", {1: math.nan}, "{token id: number in [-100, 100]}"),
    ("logit_bias", {1: "2"}, "{token id: number in [-100, 100]}"),
    *[
        ("logit_bias", v, "{token id: number in [-100, 100]}")
        for v in ({"a": 1}, {1.5: 1}, {True: 1}, {"1.5": 1}, [1], "1", 7)
    ],
    ("allowed_token_ids", [], "a list of at least one token id or None"),
    ("allowed_token_ids", [1, -1], "a list of at least one token id or None"),
    ("allowed_token_ids", "12", "a list of at least one token id or None"),
    ("seed", 2**63, "a 64-bit integer or None"),
    ("logit_bias", {t: 1 for t in range(1025)}, "with at most 1024 entries or None, got {0: 1, 1: 1"),
    ("n", 0, "an integer from 1 to 16384"),
    ("n", 16385, "an integer from 1 to 16384"),
    ("max_tokens", 0, "an integer >= 1 or None"),
    ("min_tokens", -1, "an integer >= 0"),
    ("min_tokens", 17, "more than max_tokens=16"),
    ("stop", ["a", ""], "a text or a list of non-empty texts"),
    ("stop", "", "a text or a list of non-empty texts"),
    ("stop", [7], "a text or a list of non-empty texts"),
    ("stop_token_ids", [-1], "a list of at most 128 token ids >= 0"),
    ("stop_token_ids", [2**70], "a list of at most 128 token ids >= 0"),
    ("stop_token_ids", [True], "a list of at most 128 token ids >= 0"),
    ("stop_token_ids", ["1"], "a list of at most 128 token ids >= 0"),
    ("stop_token_ids", range(129), "a list of at most 128 token ids >= 0, got (0, 1, 2"),
    ("logprobs", MAX_LOGPROBS + 1, "an integer from 0 to 20 or None"),
    ("prompt_logprobs", -1, "an integer from 0 to 20 or None"),
    *[(name, value, "a number") for name in NUMBERS for value in NOT_NUMBERS],
    *[(name, value, "") for name in COUNTS for value in (1.0, True, "1", [1])],
    *[(name, value, "True or False") for name in FLAGS for value in (1, None, "true")],
    *[(name, value, "a ") for name in LISTS for value in (5, 0, False)],
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD, ids=lambda v: str(v)[:20])
def test_a_bad_value_is_refused_by_name_and_with_what_was_expected(name: str, value: Any, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(name)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 1},
        {"repetition_penalty": 1e-300, "presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, "7": 100}, "allowed_token_ids": [0]},
        {"logit_bias": {}, "stop": None, "stop_token_ids": None},
        {"seed": -(2**63), "n": 16384, "max_tokens": None, "min_tokens": 2**40},
        {"max_tokens": 3, "min_tokens": 3, "logprobs": 0, "prompt_logprobs": 20},
        {"logit_bias": {t: 1 for t in range(1024)}, "stop_token_ids": range(128)},
        {"top_k": 2**40, "temperature": 1e300},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_in_them(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        if name not in ("logit_bias", *LISTS):
            assert getattr(params, name) == value


@pytest.mark.parametrize(("own", "given", "refused"), [(5, 123, False), (5, 124, True), (129, 0, True)])
def test_the_stop_tokens_of_the_model_count_too(own: int, given: int, refused: bool) -> None:
    info = EngineInfo("Stub", "float32", "cpu", 1000, 64, tuple(range(own)), 0, True)
    inputs = InputProcessor(info, None)
    params = SamplingParams(stop_token_ids=range(500, 500 + given))
    if refused:
        with pytest.raises(RequestError, match=r"129 token ids would end the request.* expected at most 128"):
            inputs.requests("a", [1], params)
    else:
        (request,) = inputs.requests("a", [1], params)
        assert len(request.stop_token_ids) == own + given


def test_lists_and_text_keys_are_taken_over() -> None:
    ids, bias = [1, 2], {"5": 1, 6: -2.5}
    params = SamplingParams(stop="end", stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias)  # type: ignore[arg-type]
    ids.append(3)
    bias["5"] = 9
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("end",), (1, 2), (1, 2))
    assert params.logit_bias == {5: 1, 6: -2.5}
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "penalized"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -1}, True),
        ({"frequency_penalty": 1}, True),
    ],
)
def test_penalized(values: dict[str, Any], penalized: bool) -> None:
    assert SamplingParams(**values).penalized is penalized


def test_greedy_is_a_temperature_too_low_to_divide_by() -> None:
    assert [SamplingParams(temperature=t).greedy for t in (0, 1e-300, 9.9e-6, 1e-5, 1)] == [True] * 3 + [False] * 2


def test_an_unknown_name_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(RequestError, match=r"'max_token': did you mean 'max_tokens'\? Known: temperature"):
        SamplingParams.from_dict({"max_token": 1})
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'beam': Known"):
        SamplingParams.from_dict({"beam": 1})
    assert SamplingParams.from_dict({"top_k": 3, "stop": ["x"]}) == SamplingParams(top_k=3, stop=("x",))


def test_every_field_is_described_and_has_a_range() -> None:
    kinds = get_type_hints(SamplingParams, include_extras=True)
    assert all(kind is bool or "Meta(" in str(kind) for kind in kinds.values())
    assert kinds.keys() <= {line.split()[0] for line in (SamplingParams.__doc__ or "").splitlines() if line.strip()}


@pytest.mark.parametrize(
    ("generation", "fields"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 3}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"max_new_tokens": 99, "max_length": 5}, {"max_tokens": 99}),
        ({"repetition_penalty": 1.05, "min_p": 0.1, "top_k": None}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"temperature": None, "num_beams": 4, "transformers_version": "5"}, {}),
    ],
    ids=str,
)
def test_defaults_of_a_generation_config(generation: dict[str, Any], fields: dict[str, Any]) -> None:
    assert defaults_of(generation) == fields
    SamplingParams.from_dict(fields)


def test_a_schema_nested_beyond_what_python_can_read_is_refused() -> None:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(1000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="structured_outputs is nested too deeply to be read"):
        SamplingParams(structured_outputs={"json": schema})
