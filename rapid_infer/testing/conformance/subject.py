"""What the checks of one architecture share: checkpoint, oracle and its runs, engines and ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.llm import LLM
from rapid_infer.loader.inventory import Inventory
from rapid_infer.loader.load import LoadReport, load_weights
from rapid_infer.loader.plan import LoadPlan, plan_load
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.ops import OpResolver
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.parallel import ParallelState
from rapid_infer.registry import Entry, ModelRegistry, load_target
from rapid_infer.testing.conformance.case import Case
from rapid_infer.testing.oracle import GreedyRun, Oracle
from rapid_infer.testing.tiny import make_checkpoint
from rapid_infer.worker.build import allocate_caches, grouped_modules

LENGTHS = (1, 2, 15, 16, 17, 33, 70)
VARIANT_LENGTHS = (2, 17, 70)
MAX_TOKENS = 12
BLOCK = 64
"""Tokens of a block where a test lays out the cache itself: one block holds all."""


class Subject:
    """One architecture at one set of sizes. Everything is made when it is first asked for."""

    def __init__(self, entry: Entry, case: Case, variant: str = "") -> None:
        self.entry, self.case, self.variant = entry, case, variant
        self.sizes: Mapping[str, Any] = {**case.sizes, **case.variants.get(variant, {})}

    @property
    def name(self) -> str:
        return f"{self.entry.name}-{self.variant}" if self.variant else self.entry.name

    @cached_property
    def cls(self) -> Any:
        return ModelRegistry.load(self.entry)

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="rapid-infer-conformance-")

    @cached_property
    def path(self) -> Path:
        return self.store("float32")

    def store(self, dtype: str) -> Path:
        """A directory with the checkpoint in this dtype."""
        path = Path(self._folder.name) / dtype
        if not path.exists():
            if self.case.checkpoint is not None:
                write: Any = load_target(self.case.checkpoint)
                write(path, dict(self.sizes), dtype)
            else:
                named = {"architectures": [self.entry.name]}
                config = self.case.config(self.variant)
                make_checkpoint(path, config, dtype=dtype, gain=self.case.gain, config_updates=named)
        return path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return read_checkpoint(self.path)

    @cached_property
    def oracle(self) -> Oracle:
        return self.oracle_of(self.path)

    def oracle_of(self, path: Path, dtype: str = "float32") -> Oracle:
        if self.case.oracle is None:
            return Oracle(path, dtype)
        made: Any = load_target(self.case.oracle)
        return ReferenceOracle(made(path))

    @cached_property
    def runs(self) -> list[GreedyRun]:
        """Of the oracle, without a close call; varied, since one that repeats itself hides mistakes in positions."""
        runs = self.oracle.clear_runs(VARIANT_LENGTHS if self.variant else LENGTHS, MAX_TOKENS)
        varied = sum(len(set(run.tokens)) for run in runs)
        expect(
            varied > 0.4 * MAX_TOKENS * len(runs), f"the oracle repeats itself, {varied} tokens differ; other sizes?"
        )
        return runs

    @contextmanager
    def open(self, path: Path | None = None, **options: Any) -> Iterator[LLM]:
        """An engine on the CPU in fp32. Afterwards nothing may be left behind in it."""
        given = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, **options}
        if self.entry.distribution is not None:
            given["model_plugin"] = self.entry.distribution
        with LLM(str(path or self.path), **given) as llm:
            yield llm
            core = llm.engine.core
            while core.has_unfinished_requests():
                core.step()
            core.check_integrity()
            left = [pool.num_usable - pool.num_free for pool in core.cache.pools]
            assert not any(left), f"{left} cache blocks are still held when no request is left"

    def rank(self, parallel: ParallelState | None = None, load: bool = True) -> Rank:
        """One rank's model, on the meta device unless it is to be loaded."""
        config = self.cls.read_config(self.checkpoint.hf_config)
        ctx = BuildContext(torch.float32, OpResolver("cpu"), 128, parallel or ParallelState(), block_size=BLOCK)
        with torch.device("cpu" if load else "meta"), torch.no_grad():
            model = self.cls(config, ctx).eval()
        if not load:
            return Rank(model, plan_load(model, model.weight_map, Inventory.scan(self.path)), None)
        report = load_weights(model, model.weight_map, self.path)
        allocate_caches(model, 2 + len(grouped_modules(model)), BLOCK, "cpu")
        return Rank(model, None, report)


class Rank:
    """A model, how it was planned to load, and what loading did."""

    def __init__(self, model: Any, plan: LoadPlan | None, report: LoadReport | None) -> None:
        self.model, self.plan, self.report = model, plan, report

    @torch.inference_mode()
    def run(self, tokens: list[int], received: Any = None) -> Any:
        """What the model's forward gives for one whole prompt of up to BLOCK tokens, each of them asked for."""
        count, groups = len(tokens), range(len(grouped_modules(self.model)))
        positions = torch.arange(count)
        metadata = [
            AttentionMetadata(
                block_table=torch.tensor([[group + 1]], dtype=torch.int32),
                rows=torch.zeros(1, dtype=torch.int64),
                query_start=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([count], dtype=torch.int32),
                slots=(group + 1) * BLOCK + positions,
                max_query_len=count,
                max_seq_len=count,
                num_decodes=int(count == 1),
            )
            for group in groups
        ]
        return self.model(ForwardBatch(torch.tensor(tokens), positions, metadata, received=received))

    def logits(self, tokens: list[int]) -> Tensor:
        """fp32 `[tokens, vocab]`."""
        hidden = self.run(tokens)
        with torch.inference_mode():
            return self.model.head.logits(hidden)


class ReferenceOracle(Oracle):
    """An author's own reference in the place of transformers."""

    def __init__(self, reference: Any) -> None:
        self.reference, self.model = reference, getattr(reference, "model", None)

    @property
    def vocab_size(self) -> int:
        return self.reference.vocab_size

    def logits(self, sequences: Any) -> Tensor:
        with torch.inference_mode():
            return self.reference.logits(sequences).float()


def expect(condition: bool, message: str) -> None:
    """AssertionError with `message`, also where Python drops assert statements."""
    if not condition:
        raise AssertionError(message)
