"""What the small files of a model directory say: code that is never run, tokenizers, stop tokens, and wrong values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import make_chat_model, make_run

from rapid_infer import LLM, AsyncLLM, SamplingParams
from rapid_infer.config import EngineArgs
from rapid_infer.errors import ConfigError
from rapid_infer.llm_engine import LLMEngine
from rapid_infer.models import read_checkpoint
from rapid_infer.startup import configure, locate
from rapid_infer.text import Tokenizer

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_chat_model(tmp_path_factory.mktemp("whole")))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change(file: Path, **updates: Any) -> None:
    values = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**values, **updates}))


def forget(file: Path, name: str) -> None:
    values = json.loads(file.read_text())
    del values[name]
    file.write_text(json.dumps(values))


@pytest.fixture
def code(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code in the model directory that leaves a trace when it runs, and a user who says yes to every question."""
    trace = model / "trace"
    (model / "own.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: trace.write_text("asked") and "y")
    return trace


def in_config(model: Path) -> str:
    change(model / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    return r"config.json has auto_map=.*never run.*AutoConfig.register\('own'"


def in_tokenizer(model: Path) -> str:
    change(model / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    change(model / "config.json", model_type="llama")
    return "tokenizer_config.json has auto_map, code in the checkpoint, which is never run"


@pytest.mark.parametrize("where", [in_config, in_tokenizer])
@pytest.mark.parametrize("open_", [LLM, LLMEngine, AsyncLLM, "cli", Tokenizer])
def test_code_of_a_checkpoint_is_never_run_and_nobody_is_asked(where, open_, model, code, capsys) -> None:
    message = where(model)
    if open_ is Tokenizer and where is in_config:
        assert Tokenizer(model).encode("A") == [65]
    elif open_ == "cli":
        status, _, err = make_run(capsys)("generate", str(model), "-p", "A", "--device", "cpu")
        assert status == 2
        assert "never run" in err
    else:
        with pytest.raises(ConfigError, match=message) as caught:
            open_(str(model), **({} if open_ is Tokenizer else {"device": "cpu"}))
        assert "trust_remote_code" not in str(caught.value)
    assert not code.exists()


def test_a_known_model_type_needs_no_code_of_the_checkpoint(model: Path, code: Path) -> None:
    change(model / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    assert type(read_checkpoint(model).hf_config).__name__ == "Qwen3Config"
    assert not code.exists()


def test_a_plugin_may_bring_the_config_class(model: Path, code: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoConfig, Qwen3Config

    class OwnConfig(Qwen3Config):
        model_type = "own"

    in_config(model)
    AutoConfig.register("own", OwnConfig)
    try:
        assert isinstance(read_checkpoint(model).hf_config, OwnConfig)
    finally:
        CONFIG_MAPPING._extra_content.pop("own")
    assert not code.exists()


def no_files(model: Path) -> str:
    for name in TOKENIZER:
        (model / name).unlink()
    return "found none of tokenizer.json, tokenizer.model, vocab.json"


def a_class_without_vocabulary(model: Path) -> str:
    (model / "tokenizer.json").unlink()
    change(model / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    # transformers makes a tokenizer of three tokens of this.
    return "found none of tokenizer.json, tokenizer.model, vocab.json"


def sentencepiece_alone(model: Path) -> str:
    no_files(model)
    (model / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    return "tokenizer.model alone, a SentencePiece file, .*`pip install sentencepiece`.*add tokenizer.json"


def not_json(model: Path) -> str:
    (model / "tokenizer.json").write_text("{")
    return "no usable tokenizer in .*line 1 column 2"


@pytest.mark.parametrize("open_", [LLM, LLMEngine, AsyncLLM])
@pytest.mark.parametrize("break_", [no_files, a_class_without_vocabulary, sentencepiece_alone, not_json])
def test_a_broken_tokenizer_is_found_before_the_weights(break_, open_, model: Path) -> None:
    message = break_(model)
    # Without its weights, an engine that looked at them first would speak of them.
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=message):
        open_(str(model), device="cpu")


def test_a_wrong_config_is_not_blamed_on_the_tokenizer(model: Path) -> None:
    change(model / "config.json", hidden_size="64")
    assert Tokenizer(model).encode("A") == [65]
    with pytest.raises(ConfigError, match=r"config.json cannot be read as a model config.*'hidden_size'.*'64'"):
        LLM(str(model), device="cpu")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ("absent", None, (2,)),
        ("absent", 5, (5,)),
        ("absent", [], (2,)),
        (None, None, ()),
        (4, [5, 4], (4, 5)),
        ([4, 6], 5, (4, 6, 5)),
    ],
)
def test_stop_tokens_of_the_files(config, generation, expected, tmp_path: Path) -> None:
    """Where neither names any, the default of the config class, here LlamaConfig's 2; null in config.json is none."""
    named = {} if config == "absent" else {"eos_token_id": config}
    change(tmp_path / "config.json", model_type="llama", architectures=["LlamaForCausalLM"], **named)
    if generation is not None:
        change(tmp_path / "generation_config.json", eos_token_id=generation)
    assert read_checkpoint(tmp_path).stop_token_ids == expected


@pytest.mark.parametrize("skip", [False, True])
def test_the_tokenizers_own_stop_token_counts_too(skip: bool, model: Path) -> None:
    """With the ids of the files, of which those that the model cannot give are left out."""
    change(model / "config.json", eos_token_id=[66, -1])
    change(model / "generation_config.json", eos_token_id=[67, 256])
    change(model / "tokenizer_config.json", eos_token="<0x41>")
    own = (66, 67) if skip else (66, 67, 65)
    with LLM(str(model), device="cpu", skip_tokenizer_init=skip) as llm:
        assert llm.engine.inputs.info.stop_token_ids == own
        only = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[65])
        output = llm.generate([[70, 71]], only)[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == (([65] * 3, "length") if skip else ([65], "stop"))
        ignoring = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[65], ignore_eos=True)
        assert llm.generate([[70, 71]], ignoring)[0].outputs[0].token_ids == [65] * 3
    if not skip:
        served = AsyncLLM(str(model), device="cpu")
        served.shutdown()
        assert served.info.stop_token_ids == served.inputs.info.stop_token_ids == own


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", "0.7", "temperature must be a number >= 0"),
        ("temperature", -1, "temperature must be a number >= 0"),
        ("top_k", 1.5, "top_k must be an integer"),
        ("top_p", 0, r"top_p must be a number in \(0, 1\]"),
        ("max_new_tokens", 0, "max_tokens must be an integer >= 1"),
        ("repetition_penalty", True, "repetition_penalty must be a number > 0"),
        ("do_sample", "false", "expected true or false"),
        ("eos_token_id", "2", "expected a token id or a list of token ids"),
        ("eos_token_id", [2, None], "expected a token id or a list of token ids"),
        ("eos_token_id", True, "expected a token id or a list of token ids"),
    ],
)
def test_a_wrong_value_in_generation_config_is_named_at_load(name: str, value: Any, expected: str, model: Path) -> None:
    change(model / "generation_config.json", **{name: value})
    with pytest.raises(ConfigError) as caught:
        locate(str(model), EngineArgs())
    caught.match(rf"generation_config.json has {name}=")
    caught.match(expected)


def test_what_generation_config_may_say(model: Path) -> None:
    values = {"do_sample": None, "temperature": None, "top_p": 1, "eos_token_id": None, "transformers_version": "4"}
    change(model / "generation_config.json", **values, temprature=3)
    assert read_checkpoint(model).generation["top_p"] == 1


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "256"}, "vocab_size.*'256'"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: expected an integer >= 1"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2: expected an integer >= 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0: expected an integer >= 1"),
        ({"max_position_embeddings": "8192"}, "max_position_embeddings.*'8192'"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps.*'1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: expected a finite number"),
        ({"eos_token_id": "2"}, "eos_token_id='2': expected a token id"),
        ({"rope_theta": "1e6", "rope_parameters": None}, "rope_theta='1e6' among its RoPE parameters"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"}}, "embeddings='x'"),
    ],
    ids=str,
)
def test_a_wrong_quantity_in_config_is_named_with_its_file(updates, expected: str, model: Path) -> None:
    change(model / "config.json", **updates)
    for name in [name for name, value in updates.items() if name == "rope_parameters" and value is None]:
        forget(model / "config.json", name)
    args = EngineArgs(device="cpu")
    with pytest.raises(ConfigError, match=expected) as caught:
        configure(*locate(str(model), args), args)
    assert str(model) in str(caught.value)
    assert "config.json" in str(caught.value)
