"""What a user gets for each way a model directory, a request or an option can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rapid_infer import LLM, SamplingParams
from rapid_infer.errors import ConfigError, HubError, PluginError, RapidInferError, RequestError, WeightError
from rapid_infer.testing.tiny import TINY, make_checkpoint


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config

    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), Qwen3Config(**TINY, head_dim=16))


@pytest.fixture
def model(qwen3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen3, tmp_path / "model"))


def load(path: Path, **kwargs: object) -> LLM:
    return LLM(str(path), **{"skip_tokenizer_init": True, "device": "cpu", **kwargs})


def change_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_weights(path: Path, change) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})


def shard(path: Path) -> Path:
    """Split the weights into two files with an index; returns the second file."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = list(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({key: tensors[key].clone() for key in keys}, path / file)
    index = {"metadata": {}, "weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path / "model-00002-of-00002.safetensors"


def expect(error: type[RapidInferError], path: Path, *texts: str, **kwargs: object) -> str:
    with pytest.raises(error) as caught:
        load(path, **kwargs)
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
    return str(caught.value)


def test_an_empty_directory(tmp_path: Path) -> None:
    expect(HubError, tmp_path, "empty", str(tmp_path))


def test_a_directory_without_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    expect(ConfigError, tmp_path, "no config.json", "found model.safetensors")


def test_a_config_without_architectures(model: Path) -> None:
    change_config(model, architectures=None)
    expect(ConfigError, model, "architectures=None", "Qwen3ForCausalLM")


def test_a_config_that_is_not_json(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": [')
    expect(ConfigError, model, "not valid JSON")


def test_an_unknown_architecture(model: Path) -> None:
    change_config(model, architectures=["Qwen3ForCausalLMM"])
    expect(PluginError, model, "Qwen3ForCausalLMM", "Qwen3ForCausalLM")


def test_a_quantization_nobody_supports(model: Path) -> None:
    change_config(model, quantization_config={"quant_method": "bitsandbytes"})
    expect(ConfigError, model, "'bitsandbytes'", "supported: none (bfloat16, float16, float32)")


@pytest.mark.parametrize("field", ["hidden_act", "rope"])
def test_a_feature_the_model_does_not_have(model: Path, field: str) -> None:
    if field == "rope":
        change_config(model, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        expect(ConfigError, model, "dynamic", "llama3")
    else:
        change_config(model, hidden_act="gelu")
        expect(ConfigError, model, "hidden_act='gelu'", "'silu'")


def test_a_field_of_the_wrong_type(model: Path) -> None:
    change_config(model, hidden_size="64")
    expect(ConfigError, model, "hidden_size")


def test_a_shard_that_the_index_names_but_is_absent(model: Path) -> None:
    second = shard(model)
    second.unlink()
    expect(WeightError, model, second.name, "incomplete download")


def test_a_truncated_file(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    expect(WeightError, model, "model.safetensors", str(len(whole)), str(len(whole) - 1000))


def test_a_git_lfs_pointer(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 42\n"
    (model / "model.safetensors").write_text(pointer)
    expect(WeightError, model, "git lfs pull")


def test_no_weights_at_all(model: Path) -> None:
    (model / "model.safetensors").unlink()
    expect(WeightError, model, "config.json")


def test_a_foreign_prefix_is_counted_and_named(model: Path) -> None:
    change_weights(model, lambda tensors: {f"language_model.{name}": t for name, t in tensors.items()})
    count = len(load_file(model / "model.safetensors"))
    text = expect(WeightError, model, "likely cause", "language_model")
    assert str(count) in text
    assert "rename(" in text


def test_one_q_norm_missing(model: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    change_weights(model, lambda tensors: {k: t for k, t in tensors.items() if k != name})
    text = expect(WeightError, model, "missing", "layers.1.self_attn.q_norm.weight")
    assert "k_norm" not in text


def test_an_extra_tensor(model: Path) -> None:
    change_weights(model, lambda tensors: {**tensors, "model.layers.0.self_attn.sinks": torch.zeros(4)})
    expect(WeightError, model, "unexpected", "model.layers.0.self_attn.sinks")


def test_a_wrong_shape_gives_both(model: Path) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "model.norm.weight": torch.ones(63)}

    change_weights(model, narrow)
    expect(WeightError, model, "model.norm.weight", "[63]", "[64]")


def test_weights_already_cut_for_a_rank(model: Path) -> None:
    def half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        columns = ("o_proj", "down_proj")
        out = {}
        for name, tensor in tensors.items():
            kind = name.split(".")[-2]
            dim = 0 if kind in rows else 1 if kind in columns else None
            out[name] = tensor if dim is None else tensor.chunk(2, dim)[0].contiguous()
        return out

    change_weights(model, half)
    expect(WeightError, model, "already cut for tensor parallel size 2")


def test_half_a_merged_projection(model: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(model, lambda tensors: {k: t for k, t in tensors.items() if k != name})
    expect(WeightError, model, "partly filled", "layers.0.mlp.gate_up_proj.weight")


@pytest.mark.parametrize(
    ("kwargs", "texts"),
    [
        ({"max_num_seq": 4}, ["'max_num_seq'", "did you mean 'max_num_seqs'"]),
        ({"dtype": "int4"}, ["dtype", "'int4'", "bfloat16"]),
        ({"device": "tpu"}, ["'tpu'", "'cpu'"]),
        ({"max_model_len": 100_000}, ["100000", "512"]),
        ({"tensor_parallel_size": 3}, ["num_attention_heads=4", "tensor_parallel_size=3", "[1, 2, 4]"]),
        ({"kv_cache_memory_bytes": 1000}, ["KV cache", "max_model_len", "1000"]),
        ({"max_model_len": 512, "kv_cache_memory_bytes": 60_000}, ["max_model_len=512", "33 blocks"]),
        ({"op_priority": {"paged_atention": ["torch"]}}, ["paged_atention", "paged_attention"]),
        ({"op_priority": {"paged_attention": ["flash"]}}, ["'flash'", "torch"]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, ["64", "512", "chunked"]),
    ],
)
def test_options(model: Path, kwargs: dict, texts: list[str]) -> None:
    expect(ConfigError, model, *texts, **kwargs)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ([], ["empty"]),
        ([5] * 64, ["64 tokens", "max_model_len=64"]),
        ([5, 199], ["199", "0 to 198"]),
        ([5, -1], ["-1", "0 to 198"]),
        ([5, 2**40], [str(2**40), "0 to 198"]),
        ([5, "6"], ["list of token ids"]),
        ([5, 6.5], ["list of token ids"]),
        ("text", ["skip_tokenizer_init"]),
    ],
)
def test_prompts_and_the_next_one_works(qwen3: Path, prompt: list[int] | str, texts: list[str]) -> None:
    with load(qwen3, max_model_len=64) as llm:
        for good in ([], [[1, 2, 3]]):
            with pytest.raises(RequestError) as caught:
                llm.generate([*good, prompt] if prompt != [] else [*good, []], SamplingParams(max_tokens=4))
            for text in texts:
                assert text in str(caught.value)
        assert not llm.engine.has_unfinished_requests()
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4))[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_sampling_params(values: dict, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        SamplingParams(**values)


def test_an_unknown_sampling_key_names_its_neighbour() -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})
