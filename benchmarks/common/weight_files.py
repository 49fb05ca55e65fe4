"""Weight files for loading benchmarks: written with random values, dropped from the page cache, read as fast as can be.

Only for dense models whose checkpoints are named as Llama's and Qwen3's are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 4 << 30
CHUNK = 16 << 20
WRITABLE = ("qwen3", "llama")


def write_checkpoint(config: dict[str, Any], directory: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Write `config` and bf16 weights of that shape; bytes of the weights. Leaves a complete checkpoint as it is.

    ValueError for a model type whose names are not known here.
    """
    if config["model_type"] not in WRITABLE:
        raise ValueError(f"can write weights of {' and '.join(WRITABLE)}, not {config['model_type']}")
    index = directory / "model.safetensors.index.json"
    text = json.dumps(config, indent=1)
    if index.is_file() and (directory / "config.json").read_text(encoding="utf-8") == text:
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    directory.mkdir(parents=True, exist_ok=True)
    shapes = dict(_shapes(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if size + nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    # One pool of noise for all: drawing billions of values would take longer than writing them.
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: _values(pool, shape) for name, shape in shard.items()}, directory / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    (directory / "config.json").write_text(text, encoding="utf-8")
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1), encoding="utf-8")
    return total


def weight_files(directory: Path) -> list[Path]:
    return sorted(path for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))


def drop_from_cache(files: list[Path]) -> None:
    """Ask the system to forget these files' pages, so that the next read comes from the disk; Linux only."""
    if not hasattr(os, "posix_fadvise"):
        raise ValueError("this system cannot drop files from its page cache; leave --cold-files out")
    for file in files:
        with file.open("rb") as f:
            # Pages that are not on the disk yet would stay.
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_speed(files: list[Path]) -> float:
    """Bytes per second of one thread that reads the files from end to end into one buffer."""
    buffer = bytearray(CHUNK)
    done, started = 0, time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as f:
            while count := f.readinto(buffer):
                done += count
    return done / (time.perf_counter() - started)


def _values(pool: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    if len(shape) == 1:
        return torch.ones(shape, dtype=pool.dtype)
    return pool.repeat(-(-count // len(pool)))[:count].view(shape)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, config.get("num_key_value_heads", heads) * dim
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for name, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
            yield f"{layer}.self_attn.{name}_proj.weight", shape
        if config["model_type"] == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (dim,)
            yield f"{layer}.self_attn.k_norm.weight", (dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for name, shape in {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}.items():
            yield f"{layer}.mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocab, hidden)
