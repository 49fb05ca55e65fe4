"""What a plugin's author is told when a model class breaks the contract, at the check and at load."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rapid_infer_llama.model import LlamaForCausalLM
from torch import nn

from rapid_infer import LLM, SamplingParams
from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.plugin import DecoderModel, WeightMap
from rapid_infer.registry import Entry, ModelRegistry
from rapid_infer.testing import TINY, make_checkpoint
from rapid_infer.worker.contract import check_class, check_model

ENTRY = Entry("FakeForCausalLM", "fakeplug_a:Model", "plug-a", "1.0", "entry point")
ARCHITECTURE = "LlamaForCausalLM"


class Kept(LlamaForCausalLM):
    """What the tests below break in one way each."""


def broken(**attributes: Any) -> type:
    return type("Broken", (Kept,), attributes)


class Unfinished(nn.Module): ...


class Late(Kept):
    @property
    def weight_map(self) -> WeightMap:  # type: ignore[override]
        return LlamaForCausalLM.weight_map


@pytest.mark.parametrize("cls", [LlamaForCausalLM, Kept, Late])
def test_a_class_that_keeps_the_contract_passes(cls: type) -> None:
    check_class(cls, ENTRY)


@pytest.mark.parametrize(
    ("cls", "faults"),
    [
        (object, ["it is no torch.nn.Module"]),
        (
            Unfinished,
            [
                "it has no read_config, expected a static method read_config(hf_config)",
                "it has no __init__, expected __init__(self, config, ctx)",
                "it has no forward, expected forward(self, batch)",
                "it has no weight_map, expected a WeightMap",
            ],
        ),
        (broken(read_config=None), ["it has no read_config"]),
        (broken(read_config=7), ["read_config is of type int, expected a static method"]),
        (broken(read_config=lambda self, hf_config: None), ["it has read_config(self, hf_config), expected a static"]),
        (broken(weight_map={}), ["weight_map is of type dict, expected a WeightMap"]),
        (
            broken(__init__=lambda self, config: None),
            ["it has __init__(self, config), expected __init__(self, config, ctx)"],
        ),
        (
            type("Shell", (DecoderModel,), {"read_config": Kept.read_config, "weight_map": Kept.weight_map}),
            [
                "it has no attention, expected attention(self, config, ctx, number) that builds a part of a layer",
                "it has no feed_forward, expected feed_forward(",
            ],
        ),
        (broken(attention=lambda self, config: None), ["it has attention(self, config), expected attention(self"]),
        (broken(forward=lambda self: None), ["it has forward(self), expected forward(self, batch)"]),
        (broken(forward=lambda self, batch, mask: None), ["it has forward(self, batch, mask), expected"]),
    ],
)
def test_a_class_that_breaks_it_is_told_all_at_once(cls: type, faults: list[str]) -> None:
    with pytest.raises(PluginError) as caught:
        check_class(cls, ENTRY)
    text = str(caught.value)
    assert text.startswith("architecture 'FakeForCausalLM': fakeplug_a:Model (plug-a 1.0) breaks the plugin contract: ")
    for fault in faults:
        assert fault in text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    return make_checkpoint(tmp_path_factory.mktemp("llama"), LlamaConfig(**TINY))


@pytest.fixture
def load(checkpoint: Path) -> Iterator[Any]:
    """Opens the checkpoint with another class in the place of the Llama plugin's."""

    def open_(cls: type, **options: Any) -> LLM:
        globals()["Served"] = cls
        options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, **options}
        return LLM(str(checkpoint), **options)

    ModelRegistry.register(ARCHITECTURE, f"{__name__}:Served", override=True)
    yield open_
    ModelRegistry.unregister(ARCHITECTURE)


def refused(load: Any, cls: type) -> str:
    with pytest.raises(PluginError) as caught:
        load(cls)
    text = str(caught.value)
    who = (
        rf"architecture 'LlamaForCausalLM': {re.escape(__name__)}:\w+ \(registered in this process\) breaks the plugin"
    )
    assert re.match(who, text), text
    return text.partition(" contract: ")[2]


def test_the_loader_looks_at_the_class_too(load: Any) -> None:
    assert refused(load, Unfinished).startswith("it has no read_config, expected")


@dataclass(frozen=True)
class NoVocabulary:
    max_position_embeddings: int = 64


def raising(hf_config: Any) -> Any:
    return hf_config.no_such_field


@pytest.mark.parametrize(
    ("read_config", "expected"),
    [
        (lambda hf_config: None, "read_config returned None, expected a frozen dataclass"),
        (lambda hf_config: {}, "read_config returned a value of type dict, expected a frozen dataclass"),
        (lambda hf_config: NoVocabulary, "read_config returned a value of type type, expected a frozen dataclass"),
        (lambda hf_config: NoVocabulary(), "returned a NoVocabulary with no vocab_size, expected an integer"),
        (
            lambda hf_config: dataclasses.replace(Kept.read_config(hf_config), max_position_embeddings=None),
            "returned a LlamaConfig with max_position_embeddings=None, expected an integer",
        ),
        (raising, r"read_config raised AttributeError: .*no_such_field.* \(at .*:\d+\); expected a ConfigError"),
    ],
)
def test_a_config_that_the_engine_cannot_use(load: Any, read_config: Any, expected: str) -> None:
    assert re.search(expected, refused(load, broken(read_config=staticmethod(read_config))))


def test_a_size_that_no_model_has_is_the_checkpoints_fault(load: Any, checkpoint: Path) -> None:
    def read_config(hf_config: Any) -> Any:
        return dataclasses.replace(Kept.read_config(hf_config), vocab_size=-5)

    with pytest.raises(ConfigError) as caught:
        load(broken(read_config=staticmethod(read_config)))
    assert str(caught.value) == f"{checkpoint}/config.json: got vocab_size=-5, expected 1 or more"


def test_what_a_plugin_refuses_by_name_stays_its_own_error(load: Any) -> None:
    def refuse(hf_config: Any) -> Any:
        raise ConfigError("hidden_act='gelu': expected 'silu'")

    with pytest.raises(ConfigError, match=r": hidden_act='gelu': expected 'silu'$"):
        load(broken(read_config=staticmethod(refuse)))


def built(change: Any) -> type:
    def init(self: Any, config: Any, ctx: Any) -> None:
        Kept.__init__(self, config, ctx)
        change(self, config, ctx)

    return broken(__init__=init)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda self, config, ctx: delattr(self, "head"), "its attribute head is None, expected an LMHead"),
        (
            lambda self, config, ctx: setattr(self, "head", nn.Linear(2, 2)),
            "its attribute head is a value of type Linear, expected an LMHead",
        ),
        (
            lambda self, config, ctx: setattr(self.head, "vocab_size", 7),
            "head has vocab_size=7, expected 199 as read_config returned",
        ),
        (
            lambda self, config, ctx: setattr(self, "weight_map", [1]),
            "weight_map is a list of 1: a value of type int, expected a WeightMap",
        ),
    ],
)
def test_a_model_that_lacks_what_the_engine_calls(load: Any, change: Any, expected: str) -> None:
    assert refused(load, built(change)) == expected


def returning(change: Any) -> type:
    return broken(forward=lambda self, batch: change(self, Kept.forward(self, batch)))


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda self, hidden: (hidden, None), "a tuple of 2: a Tensor [2, 64] in float32, None"),
        (lambda self, hidden: {"logits": hidden}, "a value of type dict"),
        (lambda self, hidden: None, "None"),
        (lambda self, hidden: self.head.logits(hidden), "a Tensor [2, 199] in float32"),
        (lambda self, hidden: hidden[:, :32], "a Tensor [2, 32] in float32"),
        (lambda self, hidden: hidden[None], "a Tensor [1, 2, 64] in float32"),
        (lambda self, hidden: hidden[-1:], "a Tensor [1, 64] in float32"),
        (lambda self, hidden: hidden.double(), "a Tensor [2, 64] in float64"),
    ],
)
def test_a_forward_that_returns_something_else(load: Any, change: Any, got: str) -> None:
    expected = (
        "expected hidden states, which the head makes logits of: a Tensor [num_tokens, hidden] = [2, 64] in float32"
    )
    assert refused(load, returning(change)) == f"forward returned {got}, {expected}"


def test_a_forward_that_raises_is_named_with_its_place(load: Any) -> None:
    with pytest.raises(PluginError) as caught:
        load(broken(forward=lambda self, batch: batch["input_ids"]))
    assert isinstance(caught.value.__cause__, TypeError)
    pattern = r"the first forward raised TypeError: .*not subscriptable \(at .*test_contract\.py:\d+\)$"
    assert re.search(pattern, str(caught.value)), caught.value


def test_after_the_first_forward_nothing_is_checked_or_left_behind(load: Any, checkpoint: Path) -> None:
    with load(Kept) as llm, LLM(str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True) as other:
        runner = llm.engine.executor.runner
        assert not runner.model._forward_hooks
        assert torch.equal(runner.device_rows.length, torch.zeros_like(runner.device_rows.length))
        assert llm.generate([1, 2, 3])[0].outputs[0].token_ids == other.generate([1, 2, 3])[0].outputs[0].token_ids


def test_states_of_the_tokens_asked_for_alone_are_hidden_states_too(load: Any) -> None:
    """As in the first step on a GPU, which has prompts of many tokens that each get one."""
    with load(Kept) as llm:
        model, config = llm.engine.executor.runner.model, llm.engine.executor.built.config
        check_model(model, config, ARCHITECTURE)
        (result,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=1))
        assert result.outputs[0].error is None
        assert not model._forward_hooks
