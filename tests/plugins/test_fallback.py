"""A plugin for any architecture: the one of docs/adding-a-model.md, installed, and asked for."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_chat import make_run

from rapid_infer import SamplingParams
from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.registry import ModelRegistry

DOCS = Path(__file__).resolve().parents[2] / "docs" / "adding-a-model.md"
HEAD = """from rapid_infer.errors import ConfigError
from rapid_infer_llama.model import LlamaForCausalLM


"""
PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What pip would leave of the page's package."""
    page = DOCS.read_text()
    (point,) = re.findall(r'^"\*" = "my_package\.any_llama:(\w+)"$', page, re.MULTILINE)
    (example,) = re.findall(rf"```python\n(class {point}.*?)```", page, re.DOTALL)
    (tmp_path / "fake_any_llama.py").write_text(HEAD + example)
    folder = tmp_path / "fake_any-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-any\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[rapid_infer.models]\n* = fake_any_llama:{point}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ModelRegistry.__dict__.pop("_scan", None)
    yield
    ModelRegistry.__dict__.pop("_scan", None)
    sys.modules.pop("fake_any_llama", None)


@pytest.fixture
def novel(llama, tmp_path: Path) -> Path:
    """The Llama checkpoint under a name that no plugin declares."""
    path = Path(shutil.copytree(llama.path, tmp_path / "novel"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["NovelForCausalLM"]}))
    return path


def test_an_unknown_architecture_is_served_when_asked_for(installed, novel, llama, open_llm, capsys) -> None:
    with pytest.raises(PluginError, match=r"fake_any_llama:AnyLlama \(fake-any 1.0\) is used only with `--model-impl"):
        open_llm(novel)
    served, plain = open_llm(novel, model_impl="auto"), open_llm(llama)
    assert type(served.engine.executor.built.model).__name__ == "AnyLlama"
    assert type(plain.engine.executor.built.model).__name__ == "LlamaForCausalLM"
    tokens = [llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids for llm in (served, plain)]
    assert tokens[0] == tokens[1]
    for model, impl, target in (
        (novel, "auto", "fake_any_llama:AnyLlama"),
        (llama.path, "auto", "rapid_infer_llama.model:LlamaForCausalLM"),
        (llama.path, "fallback", "fake_any_llama:AnyLlama"),
    ):
        code, out, err = make_run(capsys)("inspect", str(model), "--json", "--model-impl", impl)
        assert (code, err) == (0, "")
        assert json.loads(out)["target"] == target


def test_a_fallback_refuses_by_name_what_it_cannot_serve(installed, qwen3, open_llm) -> None:
    with pytest.raises(ConfigError, match="AnyLlama serves model_type 'llama', got 'qwen3'"):
        open_llm(qwen3, model_impl="fallback")


def test_nothing_serves_as_a_fallback(novel, open_llm) -> None:
    with pytest.raises(PluginError, match="model_impl='auto': no installed plugin serves as a fallback"):
        open_llm(novel, model_impl="auto")
    with pytest.raises(ConfigError, match=r"model_impl must be one of \['plugin', 'auto', 'fallback'\], got 'any'"):
        open_llm(novel, model_impl="any")
