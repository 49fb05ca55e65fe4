"""Steps as two CUDA graphs: `forward`, from the request table to hidden states, and `finish`, to the tokens.

Neither needs the host, and nothing in their keys or launches depends on a sequence's length. Decode steps, one token
for every row, are recorded by number of rows; mixed steps, which hold longer queries too, by number of tokens. Where
that is less work, mixed steps are fresh ones if nothing longer continues a prompt. All forwards and the usual ways to
choose tokens are recorded at the start; other ways, when they are first asked for.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, product, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rapid_infer.engine.step_plan import SamplingFeatures, StepPlan
from rapid_infer.layers.attention import CachedModule
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.stack import distinct_layers
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.registry import OpResolver
from rapid_infer.worker.finish import Chosen, choose
from rapid_infer.worker.graph_recorder import Recorder
from rapid_infer.worker.logprobs import Logprobs
from rapid_infer.worker.mailbox import Mailbox
from rapid_infer.worker.request_table import RequestTable
from rapid_infer.worker.sampler import SamplingOps

logger = logging.getLogger(__name__)

GREEDY = SamplingFeatures()
USUAL = (GREEDY, SamplingFeatures(random=True), SamplingFeatures(random=True, truncated=True))
"""How tokens are chosen where nothing special is asked for: recorded at the start."""
DECODE, MIXED, FRESH = "decode", "mixed", "fresh"

T = TypeVar("T")


def row_buckets(limit: int) -> list[int]:
    """Numbers of rows, ascending: dense where a step costs little, in sixteens and then in 64s above."""
    return [*sorted({1, 2, 4, 8, *range(16, 256, 16), *range(256, limit, 64)} & set(range(1, limit))), limit]


def token_buckets(limit: int) -> list[int]:
    """Numbers of tokens, ascending: few, since each graph takes memory, but padding adds a fifth at most."""
    sizes = chain((16,), range(32, 256, 32), range(256, 512, 64), range(512, 1024, 128))
    larger = (size * step // 4 for size in (1 << n for n in range(10, 31)) for step in range(4, 8))
    return [*takewhile(lambda size: size < limit, chain(sizes, larger)), limit]


def asks_for_context(model: nn.Module) -> bool:
    """Whether mixed steps have two kinds of graphs, see `CachedModule.asks_for_context`."""
    return any(module.asks_for_context for module in model.modules() if isinstance(module, CachedModule))


def _fit(sizes: list[int]) -> list[int]:
    """For every n, at place n, the smallest size that holds it."""
    return list(chain.from_iterable([size] * (size - low) for low, size in zip([-1, *sizes], sizes)))


@dataclass(frozen=True)
class _Sampled:
    """Where a forward leaves hidden states, row numbers and total lengths of the rows that get a token."""

    hidden: Tensor
    rows: Tensor
    lengths: Tensor

    def first(self, n: int) -> _Sampled:
        return _Sampled(self.hidden[:n], self.rows[:n], self.lengths[:n])


@dataclass
class LateGraphs:
    """Graphs that were recorded while requests waited, and the seconds that took the host."""

    count: int = 0
    seconds: float = 0.0


class GraphRunner:
    """Records and replays. `replays` counts launches by graph kind; `recorded` graphs by kind; `late` those recorded
    after `capture`.
    """

    def __init__(
        self,
        model: Any,
        table: RequestTable,
        mailbox: Mailbox,
        ops: OpResolver,
        recorder: Recorder,
        *,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.model, self.table, self.mailbox = model, table, mailbox
        self.block_size, self.max_model_len = block_size, max_model_len
        self.replays: Counter[str] = Counter()
        layout, device = mailbox.layout, table.length.device
        self.sizes, self.token_sizes = row_buckets(layout.max_rows), token_buckets(layout.max_tokens)
        self._row_bucket, self._token_bucket = _fit(self.sizes), _fit(self.token_sizes)
        self._sampling = SamplingOps.bind(ops)
        self._decode_inputs, self._mixed_inputs, self._commit = (
            ops.bind(name, torch.int32) for name in ("decode_inputs", "mixed_inputs", "commit_tokens")
        )
        self._rows = torch.full((layout.max_rows,), table.dummy, dtype=torch.int64, device=device)
        self._query_start = torch.arange(layout.max_rows + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(layout.max_rows, dtype=torch.int32, device=device)
        self._asks_for_context = asks_for_context(model)
        self._mixed_sampled: _Sampled | None = None
        self._forward: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, _Sampled]] = {}
        self._finish: dict[Any, tuple[torch.cuda.CUDAGraph, Logprobs | None]] = {}
        self._recorder = recorder
        self._started = False
        self.late = LateGraphs()

    @property
    def recorded(self) -> dict[str, int]:
        kinds = Counter(kind for kind, _ in self._forward)
        return {DECODE: kinds[DECODE], MIXED: kinds[MIXED] + kinds[FRESH], "finish": len(self._finish)}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of mixed steps."""
        return (MIXED, FRESH) if self._asks_for_context else (MIXED,)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every forward and its usual finishes, largest first: smaller ones fit into the same memory."""
        for size in reversed(self.token_sizes):
            for kind in self.kinds:
                self.capture_mixed(kind, size)
        for size in reversed(self.sizes):
            self.capture_decode(size)
            for kind, features in product((DECODE, MIXED), USUAL):
                self.capture_finish(kind, size, features)
        self.mailbox.resync()
        self._started = True
        self._recorder.release_unused()

    def takes(self, plan: StepPlan) -> bool:
        """Whether graphs can run this step."""
        return plan.prompt_scores is None and plan.num_tokens <= self.mailbox.layout.max_tokens

    def shape_of(self, plan: StepPlan) -> tuple[str, int, int]:
        """(kind, rows or tokens of its forward graph, rows of its finish graph) for a step.

        The finish of a fresh step is a mixed one's.
        """
        # Tokens that the host knows come with a mixed step's letter alone.
        if plan.max_query_len == 1 and len(plan.sampled) == len(plan.rows) and not len(plan.tokens):
            size = self._row_bucket[len(plan.rows)]
            return DECODE, size, size
        kind = FRESH if self._asks_for_context and plan.max_context_len == 0 else MIXED
        return kind, self._token_bucket[plan.num_tokens], self._row_bucket[max(len(plan.sampled), 1)]

    def launch(self, plan: StepPlan, *, mail_blocks: bool) -> tuple[int, Logprobs | None]:
        """Start a step; its block updates are sent along, or have been applied. Returns its slot in the mailbox."""
        slot = self.launch_forward(plan, mail_blocks=mail_blocks)
        return slot, self.launch_finish(plan)

    def launch_forward(self, plan: StepPlan, *, mail_blocks: bool) -> int:
        """The first part of `launch`."""
        blocks = plan.new_blocks if mail_blocks else ()
        kind, size, _ = self.shape_of(plan)
        forward = self._forward[kind, size]
        if kind == DECODE:
            slot = self.mailbox.send_decode(plan.rows, size, blocks)
        else:
            slot = self.mailbox.send_mixed(plan, blocks)
        forward[0].replay()
        self.replays["forward"] += 1
        return slot

    def launch_finish(self, plan: StepPlan) -> Logprobs | None:
        """The second part of `launch`."""
        kind, _, rows = self.shape_of(plan)
        finish = self._finish.get(self._key(kind, rows, plan.features))
        if finish is None:
            finish = self.capture_finish(kind, rows, plan.features)
        finish[0].replay()
        self.replays["finish"] += 1
        return finish[1]

    def _key(self, kind: str, size: int, features: SamplingFeatures) -> Any:
        kind = DECODE if kind == DECODE else MIXED
        if features.logprobs is not None:
            # A graph for every number of alternatives would be too many; the host takes what it needs.
            count = next((n for n in (0, 5, 20) if n >= features.logprobs), features.logprobs)
            features = replace(features, logprobs=count)
        return kind, size, features, self.table.tokens.signature if features.processed else None

    def run_forward(self, size: int) -> tuple[Tensor, Tensor]:
        """What a decode graph records: (hidden states `[size, hidden]`, total lengths `[size]`)."""
        table, rows, mailbox = self.table, self._rows[:size], self.mailbox
        ids, positions, lengths, slots = self._decode_inputs(
            mailbox.mail,
            mailbox.step,
            table.block_tables,
            table.last_token,
            table.length,
            rows,
            mailbox.layout,
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

    def run_mixed(self, kind: str, size: int) -> _Sampled:
        """What a mixed or fresh graph of `size` tokens records; the result lies in the same buffers for all of them."""
        table, mailbox = self.table, self.mailbox
        inputs = self._mixed_inputs(
            mailbox.mail,
            mailbox.step,
            table.block_tables,
            table.last_token,
            table.length,
            size,
            mailbox.layout,
            self.block_size,
        )
        attention = [
            AttentionMetadata(
                block_table=block_table,
                rows=inputs.rows,
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                slots=inputs.slots[group],
                max_query_len=size,
                max_seq_len=self.max_model_len,
                num_decodes=len(inputs.rows),
                decodes=inputs.decodes,
                max_context_len=0 if kind == FRESH else None,
            )
            for group, block_table in enumerate(table.block_tables)
        ]
        batch = ForwardBatch(
            inputs.input_ids, inputs.positions, attention, live=inputs.live, logits_indices=inputs.last
        )
        hidden = batch.sampled(self.model(batch))
        if self._mixed_sampled is None:
            buffer = torch.empty(len(inputs.rows), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
            self._mixed_sampled = _Sampled(buffer, self._rows.clone(), self._lengths)
        sampled = self._mixed_sampled
        sampled.hidden.copy_(hidden)
        sampled.rows.copy_(inputs.sampled_rows)
        sampled.lengths.copy_(inputs.sampled_lens)
        return sampled

    def capture_decode(self, size: int) -> None:
        """Record a forward of `size` rows, one token each."""
        what = f"forward of {size} rows"
        graph, (hidden, lengths) = self._record_forward(what, lambda: self.run_forward(size))
        self._forward[DECODE, size] = graph, _Sampled(hidden, self._rows[:size], lengths)

    def capture_mixed(self, kind: str, size: int) -> None:
        """Record a forward of `size` tokens."""
        self._forward[kind, size] = self._record_forward(
            f"forward of {size} tokens", lambda: self.run_mixed(kind, size)
        )

    def _record_forward(self, what: str, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        def warm_up() -> None:
            with distinct_layers(self.model):
                run()

        try:
            return self._recorder.record(what, run, warm_up)
        except RuntimeError as error:
            # A model may hide from us how its layers differ.
            logger.warning("%s; trying once more, with all layers run before", error)
            return self._recorder.record(what, run)

    def capture_finish(
        self, kind: str, size: int, features: SamplingFeatures
    ) -> tuple[torch.cuda.CUDAGraph, Logprobs | None]:
        """Record how tokens are chosen after a forward of this kind for up to `size` rows."""
        key = self._key(kind, size, features)
        features, table = key[2], self.table
        if kind != DECODE:
            assert self._mixed_sampled is not None
            sampled = self._mixed_sampled.first(size)
        else:
            sampled = self._forward[kind, size][1]

        def select() -> Chosen:
            return choose(
                self.model.head, table, sampled.hidden, sampled.rows, sampled.lengths, features, self._sampling
            )

        def run() -> Logprobs | None:
            chosen = select()
            if features.penalties:
                table.tokens.count(sampled.rows, chosen.tokens)
            self._commit(
                sampled.rows,
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
        began = time.perf_counter()
        recorded = self._recorder.record(f"finish of {size} rows with {features}", run, warm)
        if self._started:
            self.late.count += 1
            self.late.seconds += time.perf_counter() - began
        self._finish[key] = recorded
        return recorded
