"""What every benchmark of the engine does around its measurement: open engines, say what runs, make the result."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from common import environment, options, routing, workloads
from common.output import Report, command_line
from common.schema import Result, RunSample
from rapid_infer.config import EngineArgs, EngineConfig
from rapid_infer.errors import ConfigError, EngineDeadError, RapidInferError
from rapid_infer.llm_engine import LLMEngine
from rapid_infer.startup import configure, locate

BUSY_LOAD = 0.25
"""Load average per core from which a machine counts as busy."""


class Session:
    """One benchmark: its options, its report, and the engine's keyword arguments that follow from both.

    A model of data/workloads.json is written into `scratch`, for random weights.
    """

    def __init__(self, name: str, ns: argparse.Namespace, scratch: Path) -> None:
        self.name, self.ns = name, ns
        self.report = Report()
        self.load_average = environment.load_average()
        # Prompts are token ids and nobody reads the text: the tokenizer is left out unless it is asked for.
        self.kwargs: dict[str, Any] = {"skip_tokenizer_init": True}
        self.model = ns.model
        if ns.model in workloads.model_names():
            self.model = str(workloads.write_model(ns.model, scratch))
            self.kwargs["load_format"] = "dummy"
        self.kwargs |= options.engine_kwargs(ns)
        if ns.uniform_routing:
            drawn = routing.engine_options()["op_priority"]
            self.kwargs["op_priority"] = {**self.kwargs.get("op_priority", {}), **drawn}

    def config(self) -> EngineConfig:
        """What these options come to, before anything is loaded."""
        args = EngineArgs.from_kwargs(**self.kwargs)
        return configure(*locate(self.model, args), args).config

    @contextmanager
    def open(self, **changes: Any) -> Iterator[tuple[LLMEngine, float]]:
        """An engine with `changes` to the keyword arguments, and the seconds it took to start; closed at the end."""
        import torch

        started = time.perf_counter()
        engine = LLMEngine(self.model, **{**self.kwargs, **changes})
        on_gpu = engine.config.device == "cuda"
        try:
            yield engine, time.perf_counter() - started
        finally:
            engine.close()
            del engine
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()

    def introduce(self, engine: LLMEngine, load_s: float) -> None:
        """Say which model runs where."""
        import torch

        config, info = engine.config, engine.core.info
        self.report.say(
            f"{self.name}: {self.ns.model} ({info.architecture}, {config.model.dtype}) on {config.device}, "
            f"{torch.get_num_threads()} threads, loaded in {load_s:.1f} s"
        )

    def warn_of_other_work(self) -> None:
        if (self.load_average or 0) > BUSY_LOAD * (os.cpu_count() or 1):
            self.report.say(
                f"note: other work is running (load average {self.load_average:.1f}): times and ratios may mislead"
            )

    def say_errors(self, runs: Sequence[RunSample]) -> None:
        failed = [request.error for run in runs for request in run.requests if request.error]
        if failed:
            self.report.say(f"{len(failed)} requests failed, the first: {failed[0]}")

    def model_info(self, engine: LLMEngine) -> dict[str, Any]:
        """For `Result.model`."""
        return {
            "name": self.ns.model,
            "architecture": engine.core.info.architecture,
            "dtype": engine.core.info.dtype,
            "weights": "random" if engine.config.model.load_format == "dummy" else "checkpoint",
            "vocab_size": engine.core.info.vocab_size,
            "config": engine.checkpoint.raw,
        }

    def result(
        self,
        model: dict[str, Any],
        engine_options: dict[str, Any],
        workload: dict[str, Any],
        samples: list[RunSample],
        metrics: dict[str, Any],
    ) -> Result:
        """With where, when and by which command it ran."""
        return Result(
            name=self.name,
            environment=environment.collect(self.load_average),
            model=model,
            engine_options={"given": self.kwargs, **engine_options},
            command=command_line(),
            workload={**workload, "warmup": self.ns.warmup, "runs": self.ns.runs},
            samples=samples,
            metrics=metrics,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def resolved(config: EngineConfig) -> dict[str, Any]:
    """Every engine option as decided."""
    return dataclasses.asdict(config)


def gpus_of(config: EngineConfig) -> int:
    """GPUs that an engine uses; 0 on a CPU."""
    parallel = config.parallel
    return max(parallel.tensor_parallel_size, parallel.expert_parallel_size) if config.device == "cuda" else 0


def refuse(kwargs: Mapping[str, Any], name: str, why: str) -> None:
    """ConfigError when an option was given that the benchmark sets by itself."""
    if name in kwargs:
        raise ConfigError(f"{name}={kwargs[name]!r} cannot be set here: {why}; leave it out")


def check_length(what: str, tokens: int, longest: int, remedy: str) -> None:
    """ConfigError when a sequence of `tokens` can never run."""
    if tokens > longest:
        raise ConfigError(f"{what} take {tokens} tokens, but max_model_len={longest} is the most; {remedy}")


class Runnable(Protocol):
    def run(self) -> int: ...


def run(make: Callable[[Path], Runnable]) -> int:
    """Run what `make` makes of a scratch folder; the exit code, with mistakes of the user as one line and a 2."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return make(Path(scratch)).run()
    except RapidInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineDeadError) else 2
