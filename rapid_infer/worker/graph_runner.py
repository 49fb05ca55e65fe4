"""Decode steps as two CUDA graphs: `forward`, from the request table to hidden states, and `finish`, to the tokens.

Neither needs the host, and nothing in their keys or launches depends on a sequence's length. Steps of other shapes run
eagerly.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rapid_infer.engine.step_plan import SamplingFeatures, StepPlan
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.registry import OpResolver
from rapid_infer.worker.finish import Chosen, choose
from rapid_infer.worker.logprobs import Logprobs
from rapid_infer.worker.mailbox import Mailbox
from rapid_infer.worker.request_table import RequestTable
from rapid_infer.worker.sampler import SamplingOps

logger = logging.getLogger(__name__)
T = TypeVar("T")

GREEDY = SamplingFeatures()


def bucket_sizes(max_rows: int) -> list[int]:
    """Rows to record graphs for, ascending: dense where a step costs little, in sixteens and then in 64s above."""
    sizes = [n for n in (1, 2, 4, 8) if n < max_rows]
    sizes += range(16, min(max_rows, 256), 16)
    sizes += range(256, max_rows, 64)
    return [*sizes, max_rows]


@dataclass(frozen=True)
class _Forward:
    """The recorded forward of one bucket and the buffers it leaves its results in."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    rows: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class _Finish:
    graph: torch.cuda.CUDAGraph
    logprobs: Logprobs | None


class GraphRunner:
    """Records and replays. `replays` counts launches by graph kind; `recorded` graphs by kind."""

    def __init__(
        self, model: Any, table: RequestTable, mailbox: Mailbox, ops: OpResolver, *, block_size: int, max_model_len: int
    ) -> None:
        self.model, self.table, self.mailbox = model, table, mailbox
        self.block_size, self.max_model_len = block_size, max_model_len
        self.replays: Counter[str] = Counter()
        self.sizes = bucket_sizes(mailbox.max_rows)
        device = table.length.device
        self._sampling = SamplingOps.bind(ops)
        self._gather = ops.bind("decode_inputs", torch.int32)
        self._commit = ops.bind("commit_tokens", torch.int32)
        self._rows = torch.full((mailbox.max_rows,), table.dummy, dtype=torch.int64, device=device)
        self._query_start = torch.arange(mailbox.max_rows + 1, dtype=torch.int32, device=device)
        self._bucket_of = [next(size for size in self.sizes if size >= n) for n in range(1, mailbox.max_rows + 1)]
        self._forward: dict[int, _Forward] = {}
        self._finish: dict[Any, _Finish] = {}
        self._started = False
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def recorded(self) -> dict[str, int]:
        return {"forward": len(self._forward), "finish": len(self._finish)}

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every forward and its greedy finish, largest first, so that smaller ones fit into the same memory."""
        for size in reversed(self.sizes):
            self._capture_forward(size)
            self._capture_finish(size, GREEDY)
        self.mailbox.resync()
        self._started = True

    def takes(self, plan: StepPlan) -> bool:
        """Whether a graph can run this step: one token for every row, and each row gets its next one."""
        return plan.max_query_len == 1 and len(plan.sampled) == len(plan.rows) and plan.prompt_scores is None

    def launch(self, plan: StepPlan, *, mail_blocks: bool) -> tuple[int, Logprobs | None]:
        """Start a step; its block updates are sent along, or have been applied. Returns its slot in the mailbox."""
        size = self._bucket_of[len(plan.rows) - 1]
        forward = self._forward[size]
        key = self._key(size, plan.features)
        finish = self._finish.get(key) or self._capture_finish(size, plan.features)
        slot = self.mailbox.send(plan.rows, size, plan.new_blocks if mail_blocks else ())
        forward.graph.replay()
        finish.graph.replay()
        self.replays["forward"] += 1
        self.replays["finish"] += 1
        return slot, finish.logprobs

    def _key(self, size: int, features: SamplingFeatures) -> Any:
        if features == GREEDY:
            return size, features
        if features.logprobs is not None:
            # A graph for every number of alternatives would be too many; the host takes what it needs.
            count = next((n for n in (0, 5, 20) if n >= features.logprobs), features.logprobs)
            features = replace(features, logprobs=count)
        return size, features, self.table.tokens.signature

    def run_forward(self, size: int) -> tuple[Tensor, Tensor]:
        """What a forward graph records: (hidden states `[size, hidden]`, total lengths `[size]`)."""
        table, rows = self.table, self._rows[:size]
        ids, positions, lengths, slots = self._gather(
            self.mailbox.mail,
            self.mailbox.step,
            table.block_tables,
            table.last_token,
            table.length,
            rows,
            self.mailbox.max_rows,
            self.block_size,
        )
        attention = [
            AttentionMetadata(
                block_table=block_table,
                rows=rows,
                query_start=self._query_start[: size + 1],
                seq_lens=lengths,
                slots=slots[group],
                max_query_len=1,
                max_seq_len=self.max_model_len,
                num_decodes=size,
            )
            for group, block_table in enumerate(table.block_tables)
        ]
        return self.model(ForwardBatch(ids, positions, attention, live=lengths)), lengths

    def _capture_forward(self, size: int) -> None:
        graph, (hidden, lengths) = self._record(f"forward of {size} rows", lambda: self.run_forward(size))
        self._forward[size] = _Forward(graph, hidden, self._rows[:size], lengths)

    def _capture_finish(self, size: int, features: SamplingFeatures) -> _Finish:
        key = self._key(size, features)
        features, forward, table = key[1], self._forward[size], self.table

        def select() -> Chosen:
            rows, lengths = forward.rows, forward.lengths
            return choose(self.model.head, table, forward.hidden, rows, lengths, features, self._sampling)

        def run() -> Logprobs | None:
            chosen = select()
            if features.penalties:
                table.tokens.count(forward.rows, chosen.tokens)
            self._commit(
                forward.rows,
                chosen.tokens,
                chosen.best,
                table.last_token,
                table.length,
                self.mailbox.results,
                self.mailbox.step,
            )
            return chosen.logprobs

        # At the start all rows are padding; later a commit that is not recorded would move real ones.
        warm = select if self._started else run
        graph, logprobs = self._record(f"finish of {size} rows with {features}", run, warm)
        self._finish[key] = recorded = _Finish(graph, logprobs)
        return recorded

    def _record(
        self, what: str, run: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                # Kernels are compiled and workspaces allocated here; during a recording neither is allowed.
                (warm_up or run)()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
        except Exception as error:
            raise RuntimeError(
                f"recording the CUDA graph for the {what} failed with {type(error).__name__}: {error}; "
                f"enforce_eager=True runs without graphs"
            ) from error
        current.wait_stream(self._stream)
        return graph, result
