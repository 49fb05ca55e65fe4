"""Without any one of the libraries that operators come from, all others are there and a model answers the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hidden_libraries
import pytest
from transformers import AutoConfig

from rapid_infer.testing import TINY, make_checkpoint

LIBRARIES = {
    "vllm": "vllm_flash_attn/_vllm_fa3_C.so",
    "flash_attn": "flash_attn_interface.py",
    "flashinfer": "prefill.py",
}
"""By a file that says it is there."""
NONE, PLUGIN = "none", "rapid_infer_ops_attention"
HIDDEN = (NONE, *LIBRARIES, PLUGIN, "triton")
PROVIDERS = {
    "vllm": {"vllm_flash_attn": "vllm is not installed"},
    "flash_attn": {"flash_attn": "flash-attn is not installed", "flash_attn_4": "flash-attn-4 is not installed"},
    "flashinfer": {"flashinfer": "flashinfer is not installed (pip install flashinfer-python)"},
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each start found. The libraries are there, as files that must not be imported to say so."""
    folder = tmp_path_factory.mktemp("libraries")
    for package, file in (*LIBRARIES.items(), ("flash_attn", "cute/interface.py")):
        (folder / package / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / package / file).touch()
        (folder / package / "__init__.py").write_text(f"raise AssertionError('{package} is imported')")
    path = make_checkpoint(tmp_path_factory.mktemp("qwen3"), AutoConfig.for_model("qwen3", **TINY))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    command = [sys.executable, hidden_libraries.__file__, str(path), *HIDDEN]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr
    return dict(zip(HIDDEN, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("package", HIDDEN[1:])
def test_a_model_answers_the_same_without(package: str, starts: dict[str, Any]) -> None:
    assert starts[package]["tokens"] == starts[NONE]["tokens"]
    assert all(len(tokens) == 6 for tokens in starts[package]["tokens"])


@pytest.mark.parametrize("package", LIBRARIES)
def test_the_table_says_what_is_missing_and_nothing_else_changes(package: str, starts: dict[str, Any]) -> None:
    """On a CPU and, as far as a CPU can say it, on a GPU."""
    for table in ("table", "on_gpu"):
        before, after = starts[NONE][table], starts[package][table]
        attention = dict(before["paged_attention"])
        for provider, why in PROVIDERS[package].items():
            assert why not in attention[provider]
            attention[provider] = [why, *attention[provider]]
        assert after == {**before, "paged_attention": attention}


def test_without_the_plugin_of_attention_its_providers_are_gone(starts: dict[str, Any]) -> None:
    before, after = starts[NONE]["table"], starts[PLUGIN]["table"]
    gone = {name for names in PROVIDERS.values() for name in names}
    left = {name: why for name, why in before["paged_attention"].items() if name not in gone}
    assert gone < before["paged_attention"].keys()
    assert after == {**before, "paged_attention": left}


def test_without_triton_every_operator_has_a_provider_on_a_gpu(starts: dict[str, Any]) -> None:
    before, after = starts[NONE]["on_gpu"], starts["triton"]["on_gpu"]
    of_triton = [op for op in before if "triton" in before[op]]
    assert len(of_triton) > 20
    for op in of_triton:
        assert (before[op]["triton"], after[op]["triton"]) == ([], ["triton is not installed"])
        assert after[op]["torch"] == []
