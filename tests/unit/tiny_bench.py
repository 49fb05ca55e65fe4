"""The model that benchmarks are tried on, and how they are started."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

TINY_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 5,
    "torch_dtype": "float32",
}


def write_tiny(directory: Path) -> Path:
    """A folder with the tiny model's config.json and nothing else, for random weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG))
    return directory


def start(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
