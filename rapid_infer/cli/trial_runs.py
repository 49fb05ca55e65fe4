"""Which providers really run: every installed model at tiny sizes with random weights, for a few tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapid_infer.registry import Entry, ModelRegistry

PROMPT, TOKENS = range(1, 20), 4


@dataclass(frozen=True)
class TrialRun:
    """`calls` per `op=provider`; `error`: why there was no run, or `skipped`: why there could be none."""

    architecture: str
    calls: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    skipped: str | None = None


def trial_runs(architectures: Iterable[str], dtype: str) -> Iterator[TrialRun]:
    """On the default device, without CUDA graphs, so that each call counts. Downloads nothing, raises nothing."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # of configs of sizes that nobody publishes
    for name in architectures:
        entry = ModelRegistry.candidates(name)[0]
        try:
            yield _run(entry, dtype)
        except Exception as error:  # whatever stands in the way is the report
            yield TrialRun(name, error=f"{type(error).__name__}: {error}")
    logging.set_verbosity(verbosity)


def _run(entry: Entry, dtype: str) -> TrialRun:
    from rapid_infer import LLM, SamplingParams
    from rapid_infer.errors import PluginError
    from rapid_infer.testing.conformance.case import case_of

    try:
        case = case_of(entry)
    except PluginError:
        return TrialRun(entry.name, skipped="its package names no tiny sizes (CASES in its module conformance)")
    if not case.model_type:
        return TrialRun(entry.name, skipped="transformers does not know its config")
    with tempfile.TemporaryDirectory(prefix="rapid-infer-doctor-") as folder:
        _write_config(Path(folder), entry.name, case.config())
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
        options |= {"max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**24}
        with LLM(folder, dtype=dtype, model_plugin=entry.distribution, **options) as llm:
            for sampling in ({"temperature": 0}, {"temperature": 0.8, "top_k": 10}):
                params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **sampling)
                answer = llm.generate([list(PROMPT)], params)[0].outputs[0]
                if answer.error:
                    return TrialRun(entry.name, error=answer.error)
            return TrialRun(entry.name, calls=llm.engine.executor.built.ops.counts())


def _write_config(folder: Path, architecture: str, config: Any) -> None:
    values = {**config.to_dict(), "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(values, default=str), encoding="utf-8")
