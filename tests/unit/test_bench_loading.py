"""The loading benchmark: weights that it writes can be loaded, and starts are timed phase by phase."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import weight_files
from common.schema import Result
from tiny_bench import TINY_CONFIG

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

CONFIG = {**TINY_CONFIG, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "bench_loading.py"), "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_written_weights_are_kept_and_split(tmp_path: Path) -> None:
    size = weight_files.write_checkpoint(CONFIG, tmp_path, shard_bytes=20_000)
    files = weight_files.weight_files(tmp_path)
    assert len(files) > 2
    assert sum(file.stat().st_size for file in files) > size
    before = [file.stat().st_mtime_ns for file in files]
    assert weight_files.write_checkpoint(CONFIG, tmp_path, shard_bytes=20_000) == size
    assert [file.stat().st_mtime_ns for file in files] == before
    assert weight_files.read_speed(files) > 0
    with pytest.raises(ValueError, match="can write weights of qwen3 and llama, not gpt2"):
        weight_files.write_checkpoint({**CONFIG, "model_type": "gpt2"}, tmp_path / "other")


@pytest.mark.parametrize("model_type", weight_files.WRITABLE)
def test_written_weights_fill_the_model(model_type: str, tmp_path: Path) -> None:
    from rapid_infer.llm_engine import LLMEngine

    architecture = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[model_type]
    config = {**CONFIG, "model_type": model_type, "architectures": [architecture]}
    size = weight_files.write_checkpoint(config, tmp_path)
    engine = LLMEngine(str(tmp_path), skip_tokenizer_init=True, device="cpu", kv_cache_memory_bytes=1_000_000)
    assert engine.executor.built.report.bytes_read == size
    assert all(torch.isfinite(param).all() for param in engine.executor.built.model.parameters())
    engine.close()


def test_bench_loading(tmp_path: Path) -> None:
    weight_files.write_checkpoint(CONFIG, tmp_path / "model")
    output = tmp_path / "loading.json"
    small = ["--threads", "1", "--kv-cache-memory-bytes", "1000000"]
    cold = ["--cold-files", "--cold-kernels"] if sys.platform == "linux" else ["--cold-kernels"]
    done = run("--model", tmp_path / "model", "--starts", "2", "--output", output, *small, *cold)
    assert done.returncode == 0, done.stderr + done.stdout
    found = Result.from_json(output.read_text())
    starts = found.metrics["starts"]
    assert len(starts) == 2
    names = [name for name, _, _ in starts[0]["phases"]]
    assert {"interpreter", "import rapid_infer", "startup.configure", "worker.load_weights", "first token"} <= set(
        names
    )
    for start in starts:
        outer = sum(seconds for _, depth, seconds in start["phases"] if depth == 0)
        # What lies between the phases is bookkeeping.
        assert outer == pytest.approx(start["total_s"], rel=0.1, abs=0.5)
        assert all(seconds >= 0 for _, _, seconds in start["phases"])
        assert start["bytes_read"] > 0
    assert found.metrics["disk"]["warm_bytes_per_s"] > 0
    assert "weights, GB/s" in done.stdout
    assert json.loads(output.read_text())["model"]["weights"] == "checkpoint"


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    done = run("--model", "demo", "--write-safetensors", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --write-safetensors writes qwen3-0.6b")
