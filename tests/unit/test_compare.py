"""`rapid-infer compare`: two runs that are alike, and runs that part in a known place."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_chat import Run, make_chat_model, make_run

from rapid_infer.cli.compare import first_different, parse_options
from rapid_infer.errors import ConfigError
from rapid_infer.testing.layer_outputs import differences, first_beyond, relative

CPU = ("--device", "cpu", "--max-tokens", "4", "-p", "Hi there")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def changed(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same weights but for the second layer's down projection."""
    path = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= -1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return make_run(capsys)


def test_a_run_is_compared_with_transformers(model: str, run: Run) -> None:
    code, out, _ = run("compare", model, "transformers", *CPU, "--dtype", "float32")
    assert code == 0, out
    assert "Qwen3ForCausalLM in float32 on cpu" in out
    assert "layers: all within 0.001\n" in out
    assert out.endswith("tokens: equal\n")


def test_two_checkpoints_part_where_their_weights_do(model: str, changed: str, run: Run) -> None:
    code, out, _ = run("compare", model, changed, *CPU, "--dtype", "float32")
    assert code == 1
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "layers: first beyond 0.001: layers.1.mlp\n" in out
    assert "layers.0.mlp" not in lines, "of the other layers the whole alone is shown"
    assert lines["layers.1.mlp"].endswith("first beyond")
    assert float(lines["layers.1.mlp"].split()[2]) == pytest.approx(2, abs=1e-4), "the other sign"
    assert float(lines["layers.0"].split()[1]) == 0
    assert "tokens: differ from number" in out


def test_options_of_one_side_make_the_difference(model: str, run: Run) -> None:
    one = ("--a", "dtype=float32", "--b", "dtype=bfloat16", "--b", "max-num-batched-tokens=3", "--json")
    code, out, _ = run("compare", model, *CPU, *one, "--tolerance", "1e-9")
    report = json.loads(out)
    assert (code, report["alike"], report["first_diverging"]) == (1, False, "embed_tokens")
    assert [place["place"] for place in report["layers"]][:3] == [
        *("embed_tokens", "layers.0.self_attn", "layers.0.mlp")
    ]
    assert 1e-4 < max(place["relative"] for place in report["layers"]) < 0.05
    assert "bfloat16" in report["b"]


def test_token_ids_need_no_tokenizer(model: str, run: Run) -> None:
    ids = ("--prompt-token-ids", "5,6,7", "--device", "cpu", "--dtype", "float32", "--max-tokens", "3")
    code, out, _ = run("compare", model, "--b", "op_priority.linear=torch", *ids)
    assert (code, "layers: all within 0.001" in out, "tokens: equal" in out) == (0, True, True), out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--b", "dtype"), "engine option 'dtype': expected NAME=VALUE"),
        (("--b", "dtype.x=1"), "engine option 'dtype.x=1': expected NAME=VALUE"),
        (("--b", "dtpe=float32"), "dtpe"),
        (("transformers", "--b", "device=cuda"), "--b device: transformers takes dtype alone"),
        (("transformers", "--b", "dtype=int4"), "dtype for transformers must be one of"),
        (("--prompt-token-ids", "one"), "--prompt-token-ids: expected numbers with commas such as 12,7,9, got 'one'"),
    ],
)
def test_what_cannot_be_compared_is_refused(model: str, run: Run, args: tuple[str, ...], said: str) -> None:
    code, out, err = run("compare", model, *args, *CPU)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err


def test_options_are_read_as_what_they_are() -> None:
    given = ["dtype=float32", "enforce-eager=true", "seed=3", "gpu_memory_utilization=0.5", "revision=none"]
    assert parse_options([*given, "op_priority.linear=onednn,torch"]) == {
        "dtype": "float32",
        "enforce_eager": True,
        "seed": 3,
        "gpu_memory_utilization": 0.5,
        "revision": None,
        "op_priority": {"linear": ["onednn", "torch"]},
    }
    with pytest.raises(ConfigError, match=r"op_priority\.linear=torch"):
        parse_options(["op_priority=torch"])


def test_differences_are_found_by_token() -> None:
    big, small = torch.tensor([1000.0, 2.0]), torch.tensor([1.0, 2.0])
    a, b = torch.stack([big, small]), torch.stack([big, small + 0.1])
    assert relative(a, b) == pytest.approx(0.1 / 2.1)
    assert relative(a, b[:1]) == float("inf")
    assert relative(a * float("nan"), b) == float("inf")
    found = differences({"x": a, "y": a[1:], "z": a}, {"x": a, "y": b, "w": b})
    assert [one.place for one in found] == ["x", "y"], "of what both have"
    assert first_beyond(found, 0.01) == "y"
    assert first_beyond(found, 0.1) is None


def test_tokens_differ_where_one_run_ends() -> None:
    assert first_different([1, 2], [1, 2]) is None
    assert first_different([1, 2], [1]) == 1
    assert first_different([], [1]) == 0
