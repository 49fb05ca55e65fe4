"""The result that every benchmark writes: one JSON object that says what ran, where, and what was measured."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass
class Environment:
    """Where a benchmark ran. None: not known here. `load_average`: of the minute before it began."""

    rapid_infer: str | None = None
    commit: str | None = None
    uncommitted_changes: bool | None = None
    python: str | None = None
    torch: str | None = None
    transformers: str | None = None
    cuda: str | None = None
    driver: str | None = None
    gpus: list[str] = field(default_factory=list)
    topology: str | None = None
    cpu: str | None = None
    cores: int | None = None
    threads: int | None = None
    load_average: float | None = None
    platform: str | None = None


@dataclass
class RequestSample:
    """One request. Times are seconds since the run began.

    output_tokens   tokens delivered; `first_token_s` and `itl_s` are empty where only the end was observed
    itl_s           gap before each token but the first
    error           why it did not deliver what was asked
    """

    input_tokens: int
    output_tokens: int
    start_s: float
    end_s: float
    first_token_s: float | None = None
    cached_tokens: int = 0
    itl_s: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass
class RunSample:
    """All requests of one timed run; `wall_s` goes from before the first was added until after the last ended.

    label   the setting that ran, in a benchmark that compares several
    """

    wall_s: float
    requests: list[RequestSample]
    label: str | None = None


@dataclass
class Result:
    """One benchmark of one engine. `peers`: other engines on the same work, measured here or recorded elsewhere."""

    name: str
    environment: Environment
    model: dict[str, Any]
    engine_options: dict[str, Any]
    command: str
    workload: dict[str, Any]
    samples: list[RunSample]
    metrics: dict[str, Any]
    peers: list[dict[str, Any]] = field(default_factory=list)
    created: str | None = None
    schema_version: int = SCHEMA_VERSION

    def to_json(self, detail: bool = True) -> str:
        """As text; without `detail` the gaps between tokens, which are most of it, are left out."""
        data = dataclasses.asdict(self)
        if not detail:
            for run in data["samples"]:
                for request in run["requests"]:
                    request["itl_s"] = []
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read what `to_json` wrote. ValueError for another schema version, TypeError for unknown fields."""
        data = json.loads(text)
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {data.get('schema_version')!r}, expected {SCHEMA_VERSION}")
        data["environment"] = Environment(**data["environment"])
        data["samples"] = [
            RunSample(**{**run, "requests": [RequestSample(**request) for request in run["requests"]]})
            for run in data["samples"]
        ]
        return cls(**data)
