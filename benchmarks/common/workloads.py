"""The fixed work (data/workloads.json): model shapes and requests by name, the same token ids for every engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
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

    def requests(self, vocab_size: int, seed: int = SEED) -> list[Request]:
        """The same for the same vocabulary size, in every process."""
        rng, tokens = _draw(seed, vocab_size)
        prefix, out = tokens(self.prefix), []
        for _ in range(self.seqs):
            n, m = rng.randint(*self.input), rng.randint(*self.output)
            out.append((prefix + tokens(n), m))
        return out


@dataclass(frozen=True)
class GroupedWorkload:
    """`groups` groups of `size` requests; a group shares `prefix` tokens, each request has `tail` of its own."""

    groups: int
    size: int
    prefix: int
    tail: int
    output: int

    def requests(self, vocab_size: int, part: int = 0) -> list[Request]:
        """In turn over the groups, so the first of each come first. Another `part`: the same prefixes, new tails."""
        _, tokens = _draw(SEED, vocab_size)
        prefixes = [tokens(self.prefix) for _ in range(self.groups)]
        _, tokens = _draw(SEED + 1 + part, vocab_size)
        return [(prefix + tokens(self.tail), self.output) for _ in range(self.size) for prefix in prefixes]

    def hit_rate(self, block_size: int, filled: bool) -> float:
        """Share of prompt tokens in whole blocks of a prefix that an earlier request has.

        `filled`: the prefixes are in the cache before the first request.
        """
        whole = self.prefix // block_size * block_size
        finding = self.size if filled else self.size - 1
        return finding * whole / (self.size * (self.prefix + self.tail))


def _draw(seed: int, vocab_size: int) -> tuple[random.Random, Callable[[int], list[int]]]:
    """A generator, and what draws that many token ids from it."""
    rng = random.Random(seed)
    # Both ends of a vocabulary hold special tokens; a tiny one has no room to leave them out.
    low, high = (1000, vocab_size - 2000) if vocab_size > 4000 else (0, vocab_size)
    return rng, lambda n: [rng.randrange(low, high) for _ in range(n)]


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
