"""A weight format of an installed package: linear layers, the latent up-projection, experts and the head are all asked,
and what it stores and multiplies takes the place of plain matrices."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rapid_infer import SamplingParams
from rapid_infer.errors import PluginError
from rapid_infer.ops import fused_experts
from rapid_infer.quant import OUT, Dim, ParamSpec, PlainMethod, StoredModules, select_scheme

ROWS = Dim("input", None)


def matrix(layer: Any) -> Tensor:
    return layer.weight.float() * layer.scale


class Rows:
    """8-bit integers with a scale for each row."""

    def __init__(self, asked: list[str], name: str) -> None:
        asked.append(name)

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(torch.int8), "scale": ParamSpec(torch.float32, (OUT, ROWS))}

    def bind(self, layer: nn.Module, ctx: Any) -> None: ...

    def finalize(self, layer: nn.Module) -> None: ...


class RowsLinear(Rows):
    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, matrix(layer))

    def dequantize(self, layer: nn.Module) -> Tensor:
        return matrix(layer)


class RowsExperts(Rows):
    def apply(self, layer: Any, x: Tensor, weights: Tensor, slots: Tensor, shared: Tensor | None) -> Tensor:
        return fused_experts(x, matrix(layer.gate_up_proj), matrix(layer.down_proj), weights, slots, shared)


class RowsHead(Rows):
    def logits(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        return F.linear(hidden, matrix(layer)).float()

    def argmax(self, layer: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        value, index = self.logits(layer, hidden).max(dim=-1)
        return value, index

    def packed_bytes(self, layer: nn.Module) -> int:
        return 0


class RowsScheme:
    name = "rows"

    asked: list[str] = []  # noqa: RUF012

    @classmethod
    def from_config(cls, config: Mapping[str, Any], modules: StoredModules) -> RowsScheme:
        assert config["quant_method"] == "rows"
        assert [part.name for part in modules.of("layers.0.self_attn.o_proj")] == ["model.layers.0.self_attn.o_proj"]
        return cls()

    def method(self, module: str) -> RowsLinear:
        return RowsLinear(self.asked, module)

    def experts(self, module: str) -> RowsExperts:
        return RowsExperts(self.asked, module)

    def head(self, module: str) -> RowsHead:
        return RowsHead(self.asked, module)


def rounded(source: Path, into: Path) -> tuple[Path, Path]:
    """The checkpoint in 8 bits, and the same values as plain matrices."""
    tensors = load_file(source / "model.safetensors")
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.ndim < 2 or "embed_tokens" in name or name.endswith("mlp.gate.weight"):
            stored[name] = plain[name] = value
            continue
        scale = value.abs().amax(-1, keepdim=True) / 127
        stored[name] = (value / scale).round().to(torch.int8)
        stored[name.removesuffix("weight") + "scale"] = scale
        plain[name] = stored[name].float() * scale
    paths = into / "stored", into / "plain"
    for path, content in zip(paths, (stored, plain)):
        shutil.copytree(source, path)
        save_file(content, path / "model.safetensors")
    config = json.loads((paths[0] / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "rows"}}))
    return paths


class Incomplete:
    @classmethod
    def from_config(cls, config: Mapping[str, Any], modules: StoredModules) -> Incomplete:
        return cls()

    def method(self, module: str) -> PlainMethod:
        return PlainMethod()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "formats-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: formats\nVersion: 1.0\n")
    entries = f"rows = {__name__}:RowsScheme\nincomplete = {__name__}:Incomplete\n"
    (folder / "entry_points.txt").write_text(f"[rapid_infer.quantization]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_a_scheme_that_lacks_methods_is_told() -> None:
    with pytest.raises(
        PluginError, match=r"'incomplete': .*:Incomplete has no experts, no head; expected a QuantScheme"
    ):
        select_scheme({"quant_method": "incomplete"})


@pytest.mark.usefixtures("installed")
def test_everything_that_multiplies_is_asked_and_loaded(
    mla: Any, open_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, plain = rounded(mla.path, tmp_path)
    prompts, params = [[5, 6, 7, 8, 9], [11, 12, 13]], SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    expected = open_llm(plain).generate(prompts, params)
    monkeypatch.setattr(RowsScheme, "asked", [])
    llm = open_llm(stored)
    for got, wanted in zip(llm.generate(prompts, params), expected):
        assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert got.outputs[0].cumulative_logprob == pytest.approx(wanted.outputs[0].cumulative_logprob, abs=1e-3)
    assert {"head", "layers.1.mlp.experts", "layers.0.self_attn.kv_b_proj", "layers.0.mlp.down_proj"} <= {
        *RowsScheme.asked
    }
    model = llm.engine.executor.runner.model
    assert model.head.weight.dtype is model.layers.get_submodule("1").mlp.experts.down_proj.weight.dtype is torch.int8
    up = model.layers.get_submodule("0").self_attn.kv_b_proj
    assert (up.matrix.dtype, up.weight.numel(), up.scale.numel()) == (torch.float32, 0, 0)


def test_the_example_package(llama: Any, open_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).resolve().parents[2] / "examples" / "quantization"
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site" / "rapid_infer_int8-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = [f"{name} = {value}" for name, value in project["entry-points"]["rapid_infer.quantization"].items()]
    (folder / "entry_points.txt").write_text("\n".join(["[rapid_infer.quantization]", *entries]))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.syspath_prepend(str(source / "src"))
    tensors = load_file(llama.path / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if "_proj" in name:
            scale = value.abs().amax(1, keepdim=True) / 127
            stored[name], stored[f"{name}_scale"] = (value / scale).round().to(torch.int8), scale
            plain[name] = stored[name].float() * scale
    outputs = []
    for kind, content in (("stored", stored), ("plain", plain)):
        shutil.copytree(llama.path, tmp_path / kind)
        save_file(content, tmp_path / kind / "model.safetensors")
        config = json.loads((llama.path / "config.json").read_text())
        if kind == "stored":
            config["quantization_config"] = {"quant_method": "int8-rows"}
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
        llm = open_llm(tmp_path / kind)
        outputs.append(llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, logprobs=0))[0].outputs[0])
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].cumulative_logprob == pytest.approx(outputs[1].cumulative_logprob, abs=1e-4)
