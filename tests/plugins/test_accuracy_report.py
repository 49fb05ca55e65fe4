"""The report of how far a model is from transformers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "accuracy_report.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_an_exact_model_is_reported_exact(script, mla, capsys):
    script.main([str(mla.path), "--dtype", "float32", "--lengths", "3", "20", "--max-tokens", "4", "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["equal_tokens"], report["tokens"], report["differing"]) == (8, 8, [])
    assert report["largest_logit_difference"] < 1e-4
    assert report["largest_kl"] < 1e-6


def test_rounding_shows_in_every_number(script, mla, capsys):
    script.main([str(mla.path), "--dtype", "bfloat16", "--lengths", "3", "20", "--max-tokens", "4"])
    words = capsys.readouterr().out
    assert "bfloat16 against transformers in float32, 2 prompts" in words
    assert "of 8 equal" in words


def test_a_difference_is_counted_and_listed(script, mla, open_llm):
    oracle = mla.oracle
    (run,) = oracle.greedy(oracle.prompts([9]), 3)
    run.tokens[2] = (run.tokens[2] + 1) % 199
    run.logits[1] = run.logits[1].roll(1)
    report = script.compare(open_llm(mla), [run], "tiny", "float32")
    assert (report.equal_tokens, report.tokens) == (2, 3)
    assert report.differing[0][:3] == (0, 2, run.tokens[2])
    assert report.first_logit_difference < 1e-4 < report.largest_logit_difference
    assert report.largest_kl > 0.1
