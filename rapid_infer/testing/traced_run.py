"""One prompt through an engine or through transformers: what its layers gave, its greedy tokens and their logits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rapid_infer.config import DTYPES
from rapid_infer.errors import ConfigError, RequestError
from rapid_infer.llm import LLM
from rapid_infer.params import SamplingParams
from rapid_infer.testing.compare import record_logits
from rapid_infer.testing.layer_outputs import layer_outputs
from rapid_infer.testing.oracle import Oracle

PLAIN = {"enforce_eager": True, "queue_depth": 1, "enable_prefix_caching": False, "skip_tokenizer_init": True}
"""Each layer is called from Python, once for each token."""


@dataclass(frozen=True)
class TracedRun:
    """`title` says of what. `outputs` as of `layer_outputs` for the prompt; `logits` fp32 `[tokens, vocab]`.

    Both are empty when the layers run where they cannot be seen: in other processes, or in CUDA graphs. `rounded`:
    not all in fp32.
    """

    title: str
    tokens: list[int]
    rounded: bool
    outputs: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None

    def gap(self, step: int) -> float | None:
        """How far the best logit of that token stands above the second best."""
        if self.logits is None:
            return None
        best, second = self.logits[step].topk(2).values.tolist()
        return best - second


def trace_engine(
    model: str, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), **options: Any
) -> TracedRun:
    """`options` of the engine, over PLAIN. ConfigError and the like as of `LLM`; RequestError when the run fails."""

    def tokens(count: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, stop_token_ids=tuple(stop))
        done = llm.generate([list(prompt)], params)[0].outputs[0]
        if done.error:
            raise RequestError(f"{model}: {done.error}")
        return done.token_ids

    with LLM(model, **{**PLAIN, **options}) as llm:
        engine, config = llm.engine, llm.engine.config
        title = f"{model}: {engine.core.info.architecture} in {config.model.dtype} on {config.device}"
        quantized = engine.checkpoint.quantization_config or config.model.quantization
        rounded = config.model.dtype != "float32" or bool(quantized)
        executor = engine.executor
        if not hasattr(executor, "runner") or config.cuda_graphs:
            return TracedRun(title, tokens(max_tokens), rounded)
        outputs = layer_outputs(executor.built.model, lambda: tokens(1))
        with record_logits(llm) as steps:
            found = tokens(max_tokens)
        logits = torch.cat(steps).float().cpu()[: len(found)]
    return TracedRun(title, found, rounded, {**outputs, "logits": logits[:1]}, logits)


def trace_transformers(
    path: Path, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), dtype: str = "float32"
) -> TracedRun:
    """On the CPU, without a cache. ConfigError when transformers cannot load the model."""
    from transformers.utils import logging

    if dtype not in DTYPES:
        raise ConfigError(f"dtype for transformers must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        oracle = Oracle(path, DTYPES[dtype])
    except Exception as error:
        raise ConfigError(f"transformers cannot load {path} ({type(error).__name__}: {error})") from error
    outputs = layer_outputs(oracle.model, lambda: oracle.logits([prompt]))
    run = oracle.greedy([prompt], max_tokens, stop)[0]
    title = f"transformers: {type(oracle.model).__name__} in {DTYPES[dtype]} on cpu"
    return TracedRun(title, run.tokens, DTYPES[dtype] != "float32", {**outputs, "logits": run.logits[:1]}, run.logits)
