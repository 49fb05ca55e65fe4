"""Collects what changes during one `schedule()` and turns it into a StepPlan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rapid_infer.engine.request import Request
from rapid_infer.engine.row_fields import settings_of
from rapid_infer.engine.row_state import RowState
from rapid_infer.engine.step_plan import (
    NewBlocks,
    NewRows,
    PromptLogprobsPlan,
    RowMasks,
    RowTokens,
    StepPlan,
    TokenLists,
)

Ints = NDArray[np.int64]
_NONE = np.zeros(0, np.int32)


def make_masks(
    rows: Sequence[tuple[int, Request]], vocab_size: int | None = None
) -> tuple[RowMasks | None, list[tuple[Request, str]]]:
    """The masks that these requests now ask for, by row; and whose raised, or do not fit the vocabulary, with what."""
    bits: dict[int, NDArray[np.int32]] = {}
    failed: list[tuple[Request, str]] = []
    for row, request in rows:
        assert request.mask is not None
        try:
            made = request.mask.bits(request.output_token_ids)
            if vocab_size is not None and made.shape != (-(-vocab_size // 32),):
                raise ValueError(f"{made.shape} words do not make a bit for each of {vocab_size} tokens")
            bits[row] = made
        except Exception as error:
            failed.append((request, f"the token mask raised {type(error).__name__}: {error}"))
    return RowMasks(np.array(list(bits), np.int32), np.stack(list(bits.values()))) if bits else None, failed


class PlanBuilder:
    def __init__(self, num_groups: int) -> None:
        self.prompt_logprob_counts: list[tuple[Request, int]] = []
        """Of how many prompt tokens the step returns log-probabilities, by request."""
        self.failed: list[tuple[Request, str]] = []
        """Whose mask raised, and what."""
        self.gated: list[tuple[int, Request]] = []
        """Rows that get a token, and whose masks are still to be made."""
        self._new: list[tuple[int, int, Request]] = []
        self._blocks: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in range(num_groups)]

    @property
    def admitted(self) -> list[Request]:
        """Requests that start, or go on after a preemption, with this step."""
        return [request for _, _, request in self._new]

    def add_row(self, row: int, computed: int, request: Request) -> None:
        self._new.append((row, computed, request))

    def add_blocks(self, row: int, start: int, blocks: list[list[int]]) -> None:
        """The row's block tables from column `start` on, where there are blocks."""
        for (rows, columns, ids), mine in zip(self._blocks, blocks):
            new = mine[start:]
            places: Sequence[int] = range(start, len(mine))
            if 0 in new:
                places, new = [c for c in places if mine[c]], [block for block in new if block]
            rows.extend([row] * len(new))
            columns.extend(places)
            ids.extend(new)

    def build(
        self, step: int, rows: RowState, order: Ints, start: Ints, grant: Ints, sampled: Ints, guesses: Ints
    ) -> StepPlan:
        """`order`, `start`, `grant`: rows in batch order, their first new position and their number of tokens, the last
        `guesses` of which the device makes itself.
        """
        sampling = order[sampled]
        features = rows.features(sampling)
        if features.masks:
            self.gated = [(row, rows.owner(row)) for row in sampling[rows.gated[sampling]].tolist()]
        return StepPlan(
            step=step,
            rows=order.astype(np.int32),
            query_lens=grant.astype(np.int32),
            tokens=self._tokens(rows, order, start, grant),
            sampled=sampled.astype(np.int32),
            new_rows=self._new_rows(),
            new_blocks=tuple(NewBlocks(*(np.array(x, np.int32) for x in group)) for group in self._blocks),
            features=features,
            max_query_len=int(grant.max()),
            max_seq_len=int((start + grant).max()),
            num_tokens=int(grant.sum()),
            token_lists=self._token_lists(),
            prompt_logprobs=self._prompt_logprobs(rows, order, start, grant),
            masks=self._masks() if self._new else None,
            max_context_len=int(start[grant > 1].max(initial=0)),
            drafts=guesses.astype(np.int32) if guesses.any() else None,
        )

    def _tokens(self, rows: RowState, order: Ints, start: Ints, grant: Ints) -> NDArray[np.int32]:
        from_host = start < rows.initial[order]
        if not from_host.any():
            return _NONE
        tokens = np.full(int(grant.sum()), -1, np.int32)
        ends = np.cumsum(grant)
        for i in np.flatnonzero(from_host):
            request = rows.owner(order[i])
            first, count = int(start[i]), int(grant[i])
            tokens[ends[i] - count : ends[i]] = request.tokens(first, first + count)
        return tokens

    def _new_rows(self) -> NewRows | None:
        if not self._new:
            return None
        return NewRows(
            rows=np.array([row for row, _, _ in self._new], np.int32),
            computed=np.array([computed for _, computed, _ in self._new], np.int32),
            settings=settings_of(self.admitted),
        )

    def _token_lists(self) -> TokenLists | None:
        new = [(row, request) for row, _, request in self._new]
        if not any(r.params.penalized or r.params.logit_bias or r.params.min_tokens for _, r in new):
            return None

        def collect(ids_of: Callable[[Request], ArrayLike]) -> RowTokens:
            lists = [np.asarray(ids_of(request), np.int32) for _, request in new]
            rows = np.repeat([row for row, _ in new], [len(ids) for ids in lists])
            columns = np.concatenate([np.arange(len(ids)) for ids in lists])
            return RowTokens(rows.astype(np.int32), columns.astype(np.int32), np.concatenate(lists))

        values = [v for _, request in new for v in (request.params.logit_bias or {}).values()]
        return TokenLists(
            stop=collect(lambda r: r.stop_token_ids if r.params.min_tokens else ()),
            bias=collect(lambda r: tuple(r.params.logit_bias or ())),
            bias_values=np.array(values, np.float32),
            prompt=collect(lambda r: r.prompt_token_ids if r.params.penalized else ()),
            output=collect(lambda r: r.output_token_ids if r.params.penalized else ()),
        )

    def _masks(self) -> RowMasks | None:
        """Masks of rows that start and do not change."""
        made = {row: request for row, _, request in self._new if request.mask is not None and not request.mask.changes}
        masks, failed = make_masks(list(made.items()))
        self.failed += failed
        return masks

    def _prompt_logprobs(self, rows: RowState, order: Ints, start: Ints, grant: Ints) -> PromptLogprobsPlan | None:
        """Which tokens of the step are followed by a prompt token whose log-probability is asked for."""
        asked = rows.prompt_logprobs[order] >= 0
        if not asked.any():
            return None
        first_token = np.cumsum(grant) - grant
        tokens, targets = [], []
        for i in np.flatnonzero(asked):
            request = rows.owner(order[i])
            low, high = request.plan_prompt_logprobs(int(start[i]), int(start[i] + grant[i]))
            if high > low:
                self.prompt_logprob_counts.append((request, high - low))
                tokens.append(np.arange(low, high) - start[i] + first_token[i])
                targets.append(request.prompt_token_ids[low + 1 : high + 1])
        if not tokens:
            return None
        count = int(rows.prompt_logprobs[order].max())
        return PromptLogprobsPlan(np.concatenate(tokens).astype(np.int32), np.concatenate(targets), count)
