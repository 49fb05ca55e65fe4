"""The helpers that plugin tests rest on: what they make is what they say, and their assertions can fail."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from rapid_infer import LLM
from rapid_infer.testing import TINY, Oracle, assert_close, assert_exact, forced_logits, make_checkpoint, record_logits

YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 128}


def llama(**overrides):
    from transformers import LlamaConfig

    return LlamaConfig(**{**TINY, **overrides})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), llama(attention_bias=True))


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True) as opened:
        yield opened


def weights(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_equal_arguments_make_equal_weights(tmp_path):
    a, b, c = (weights(make_checkpoint(tmp_path / str(i), llama(), seed=seed)) for i, seed in enumerate((1, 1, 2)))
    assert all(a[name].equal(b[name]) for name in a)
    assert not any(a[name].equal(c[name]) for name in a)


def test_no_tensor_is_constant_and_norms_and_biases_would_be_missed(checkpoint):
    for name, tensor in weights(checkpoint).items():
        assert tensor.std() > 0.1, name
        assert ("norm" in name) == (0.8 < tensor.mean() < 1.2), name


def test_shards_and_bin_hold_the_same_weights(tmp_path):
    whole = weights(make_checkpoint(tmp_path / "whole", llama()))
    make_checkpoint(tmp_path / "shards", llama(), max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 3
    make_checkpoint(tmp_path / "bins", llama(), max_shard_size="30KB", file_format="bin")
    index = json.loads((tmp_path / "bins" / "pytorch_model.bin.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "bins").glob("pytorch_model-*.bin")}
    assert not list((tmp_path / "bins").glob("*safetensors*"))
    bins = {k: v for file in (tmp_path / "bins").glob("*.bin") for k, v in torch.load(file, weights_only=True).items()}
    for other in (weights(tmp_path / "shards"), bins):
        assert other.keys() == whole.keys()
        assert all(other[name].equal(whole[name]) for name in whole)


def test_dtype_rounds_the_same_values(tmp_path):
    exact = weights(make_checkpoint(tmp_path / "a", llama()))
    rounded = weights(make_checkpoint(tmp_path / "b", llama(), dtype="bfloat16"))
    assert all(rounded[name].equal(exact[name].bfloat16()) for name in exact)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, None),
        (YARN, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
        (
            {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        ),
    ],
    ids=["default", "yarn", "llama3"],
)
def test_old_form(rope, scaling, tmp_path):
    make_checkpoint(tmp_path, llama(rope_parameters=rope), config_form="old", dtype="float16")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == rope["rope_theta"]
    assert config["rope_scaling"] == scaling
    assert config["torch_dtype"] == "float16"
    assert not {"rope_parameters", "dtype", "layer_types"} & set(config)


def test_config_updates_and_generation_config(checkpoint, tmp_path):
    assert not (checkpoint / "generation_config.json").exists()
    updates = {"eos_token_id": [1, 2], "rope_parameters": None}
    make_checkpoint(tmp_path, llama(), config_updates=updates, generation={"eos_token_id": 3})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == [1, 2]
    assert "rope_parameters" not in config
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 3}


def test_the_oracle_agrees_with_generate_of_transformers(oracle):
    """Which uses a cache, one prompt at a time."""
    prompts = oracle.prompts([5, 9, 5, 1, 9])
    assert [len(prompt) for prompt in prompts] == [5, 9, 5, 1, 9]
    for prompt, run in zip(prompts, oracle.greedy(prompts, 12)):
        result = oracle.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert run.prompt == prompt
        assert run.tokens == result.sequences[0, len(prompt) :].tolist()
        assert torch.cat(result.logits).allclose(run.logits, atol=1e-4)


def test_the_oracle_stops_after_a_stop_token(oracle):
    [whole] = oracle.greedy([[1, 2, 3]], 10)
    stop = whole.tokens[4]
    [cut] = oracle.greedy([[1, 2, 3]], 10, stop=[stop])
    assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    assert cut.logits.shape == (len(cut.tokens), TINY["vocab_size"])


def test_clear_runs_have_no_close_call(oracle, capsys):
    runs = oracle.clear_runs([3, 30, 3], 8, prefix=[5, 6, 7, 8], min_gap=0.02)
    assert [len(run.prompt) for run in runs] == [3, 30, 3]
    assert all(run.prompt[:4] == [5, 6, 7, 8][: len(run.prompt)] for run in runs)
    for run in runs:
        best, second = run.logits.sort(dim=-1, descending=True).values[:, :2].unbind(1)
        assert run.gap == float((best - second).min()) >= 0.02
    assert f"gap {min(run.gap for run in runs):.2e}" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="whatever the seed"):
        oracle.clear_runs([3], 8, min_gap=1e3)


def test_greedy_sequences_stay_varied(oracle):
    runs = oracle.greedy(oracle.prompts([4] * 8), 16)
    assert sum(len(set(run.tokens)) for run in runs) > 8 * 16 / 2


def test_what_is_right_passes(llm, oracle):
    runs = oracle.clear_runs([3, 17], 8)
    assert_exact(llm, runs)
    assert_close(llm, runs, 1e-3)


def test_a_wrong_token_is_found(llm, oracle):
    [run] = oracle.clear_runs([6], 8)
    wrong = dataclasses.replace(run, tokens=[*run.tokens[:7], (run.tokens[7] + 1) % 199])
    with pytest.raises(AssertionError, match="transformers gives"):
        assert_exact(llm, [wrong])


@pytest.mark.parametrize("step", [0, 7])
def test_wrong_logits_are_found(step, llm, oracle):
    [run] = oracle.clear_runs([6], 8)
    logits = run.logits.clone()
    logits[step, 11] += 1e-3
    wrong = dataclasses.replace(run, logits=logits)
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_exact(llm, [wrong])
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_close(llm, [wrong], 5e-4)


def test_a_nan_is_no_small_difference(llm, oracle, monkeypatch):
    [run] = oracle.clear_runs([6], 8)
    head = type(llm.engine.executor.runner.model.head)
    plain, calls = head.logits, []

    def once_nan(self, hidden):
        calls.append(hidden)
        return plain(self, hidden) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(head, "logits", once_nan)
    without_gaps = dataclasses.replace(run, logits=run.logits / 100)
    with pytest.raises(AssertionError, match="differ by nan"):
        assert_close(llm, [without_gaps], 20.0)


def test_another_best_token_is_found(llm, oracle):
    [run] = oracle.clear_runs([6], 8)
    logits = run.logits.clone()
    logits[3, (run.tokens[3] + 1) % 199] = logits[3].max() + 1
    with pytest.raises(AssertionError, match="another token"):
        assert_close(llm, [dataclasses.replace(run, logits=logits)], 0.4)


def test_recorded_logits(llm, oracle):
    [run] = oracle.clear_runs([6], 8)
    head = llm.engine.executor.runner.model.head
    with record_logits(llm) as recorded:
        llm.generate([run.prompt] * 3)
    assert recorded[0].shape == (3, TINY["vocab_size"])
    assert recorded[0][2].allclose(run.logits[0], atol=1e-4)
    assert "logits" not in vars(head)
    assert forced_logits(llm, run).allclose(run.logits, atol=1e-4)
