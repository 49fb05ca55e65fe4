"""A model as the fake hubs hold it, and which of its files a download takes."""

import hashlib
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

from fake_hub import LFS, Cdn, Files, HuggingFaceHub, ModelScopeHub, Server, git_sha1

from rapid_infer.hub.lockfile import DIRECTORY_LOCK, LOCK_NAME

_RANDOM = random.Random(0)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WEIGHTS = SHARDS[0]
SIZE = 300_000
"""Bytes of a weight file."""


def safetensors(size: int) -> bytes:
    """A file of `size` bytes with one tensor of random ones."""
    header = b""
    for _ in range(3):  # the length of the header depends on the numbers in it
        count = size - 8 - len(header)
        header = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    return len(header).to_bytes(8, "little") + header + _RANDOM.randbytes(count)


MODEL: Files = {
    ".gitattributes": b"*.safetensors filter=lfs\n",
    "LICENSE": b"Apache-2.0",
    "README.md": b"# A model\n",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "chat_template.jinja": b"{{ messages }}",
    "config.json": b'{"architectures": ["X"]}',
    "empty.txt": b"",
    "generation_config.json": b"{}",
    "merges.txt": b"a b\n",
    SHARDS[0]: safetensors(SIZE),
    SHARDS[1]: safetensors(SIZE),
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "modeling_x.py": b"import os",
    "original/consolidated.00.pth": b"old",
    "pytorch_model.bin": b"pickle",
    "pytorch_model.bin.index.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
}
LEFT_OUT = {
    *(".gitattributes", "modeling_x.py", "original/consolidated.00.pth"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
}
TAKEN = MODEL.keys() - LEFT_OUT
SMALL = {name: MODEL[name] for name in ("config.json", WEIGHTS)}
PLACES = ("hf", "ms", "cdn")


@dataclass
class Hubs:
    """One of each kind; neither redirects to `cdn` unless a test says so."""

    hf: HuggingFaceHub
    ms: ModelScopeHub
    cdn: Cdn


def publish(hubs: Hubs, place: str, files: Files = MODEL, revision: str | None = None) -> tuple[str, Server]:
    """Put a model on a hub; returns its reference, and the server that has its bytes ("cdn": Hugging Face's)."""
    hub = hubs.ms if place == "ms" else hubs.hf
    hub.repos["org/name"][revision or ("master" if place == "ms" else "main")] = dict(files)
    if place == "cdn":
        hub.cdn = hubs.cdn
        return "hf:org/name", hubs.cdn
    return f"{place}:org/name", hub


def link_snapshot(cache: Path, files: Files, revision: str = "main") -> Path:
    """What Hugging Face's client leaves in `cache` for org/name, as older ones do: without the hub's listing."""
    repo = cache / "models--org--name"
    commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    snapshot = repo / "snapshots" / commit
    for name, data in files.items():
        blob = repo / "blobs" / (hashlib.sha256(data).hexdigest() if name.endswith(LFS) else git_sha1(data))
        for path in (blob, snapshot / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    (repo / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(commit)
    return snapshot


def stored(directory: Path) -> Files:
    """What a directory holds, without the files that downloading itself uses."""
    ours = (LOCK_NAME, DIRECTORY_LOCK)
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name not in ours]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
