"""The demo model in published formats, against the same values unquantized: logits, and perplexity of real text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from common.perplexity import perplexity
from packers import script

from rapid_infer.hub import demo, resolve
from rapid_infer.testing import record_logits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path() -> Path:
    if not demo.is_complete(demo.demo_dir()):
        pytest.skip("run `make demo` first: it fetches the model")
    return Path(resolve("demo"))


# Rows of 576 inputs: blocks of 128 that are cut short, and groups that are not.
@pytest.mark.parametrize("name", ["fp8-block", "ct-fp8-dynamic", "awq", "ct-nvfp4"])
def test_it_says_what_the_dequantized_model_says(name: str, path: Path, tmp_path: Path, open_llm: Any) -> None:
    found = []
    # In steps of 64 tokens activations stay as they are, also of formats that round them.
    options = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16, "skip_tokenizer_init": False}
    for folder in script.quantize_checkpoint(path, tmp_path, name):
        llm = open_llm(folder, **options)
        with record_logits(llm) as recorded:
            llm.generate("The capital of France is")
        found.append((recorded[0], perplexity(llm.engine, 500, 250)))
    (got, got_perplexity), (expected, expected_perplexity) = found
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    assert got_perplexity == pytest.approx(expected_perplexity, rel=3e-3)
    assert expected_perplexity < 40
