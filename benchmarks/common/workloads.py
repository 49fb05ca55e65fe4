"""The fixed work (data/workloads.json): model shapes and requests by name, the same token ids for every engine."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"
SEED = 7

Request = tuple[list[int], int]
"""A prompt's token ids, and how many tokens to generate."""


@dataclass(frozen=True)
class Workload:
    """`seqs` requests, lengths drawn evenly from [low, high]; all prompts begin with the same `prefix` tokens."""

    seqs: int
    input: tuple[int, int]
    output: tuple[int, int]
    prefix: int = 0

    def requests(self, vocab_size: int) -> list[Request]:
        """The same for the same vocabulary size, in every process."""
        rng = random.Random(SEED)
        # Both ends of a vocabulary hold special tokens; a tiny one has no room to leave them out.
        low, high = (1000, vocab_size - 2000) if vocab_size > 4000 else (0, vocab_size)

        def tokens(n: int) -> list[int]:
            return [rng.randrange(low, high) for _ in range(n)]

        prefix, out = tokens(self.prefix), []
        for _ in range(self.seqs):
            n, m = rng.randint(*self.input), rng.randint(*self.output)
            out.append((prefix + tokens(n), m))
        return out


@cache
def spec() -> dict[str, Any]:
    """What data/workloads.json holds: "models" and "workloads"."""
    return json.loads((DATA / "workloads.json").read_text(encoding="utf-8"))


def model_names() -> list[str]:
    return list(spec()["models"])


def workload_names() -> list[str]:
    return list(spec()["workloads"])


def named(name: str) -> Workload:
    """A workload of data/workloads.json. ValueError with the names there are."""
    if name not in spec()["workloads"]:
        raise ValueError(f"unknown workload {name!r}; expected one of {', '.join(workload_names())}")
    entry = spec()["workloads"][name]
    return Workload(entry["seqs"], tuple(entry["input"]), tuple(entry["output"]), entry.get("prefix", 0))


def write_model(name: str, directory: str | Path) -> Path:
    """Write config.json of a model of data/workloads.json into `directory`/`name`, for random weights; returns it."""
    path = Path(directory) / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(spec()["models"][name], indent=1), encoding="utf-8")
    return path
