"""What rows say of single tokens: biases, stop ids, how often each token was seen, and which ids are allowed.

The tables that are as wide as the vocabulary exist only once a request has needed them; lists of ids have room for the
longest that a request may bring, so that none of them ever grows. Nothing here waits for the device. A CUDA graph may
hold `process_logits` and `count_tokens`: it is good as long as `signature` is what it was at the capture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.engine.step_plan import RowMasks, TokenLists
from rapid_infer.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from rapid_infer.worker.row_settings import RowSettings


class TokenState:
    """Tables over `rows` rows; `process_logits` changes logits by them.

    stop_ids `[rows, MAX_STOP_TOKEN_IDS]` int64, -1 where unused
    bias_ids `[rows, MAX_LOGIT_BIAS]` int64, bias_values the same fp32, both 0 where unused
    in_prompt `[rows, vocab]` bool, output_counts `[rows, vocab]` int32
    mask_bits `[rows, ceil(vocab / 32)]` int32, all bits set where nothing is forbidden
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._rows, self._vocab, self._device = rows, vocab_size, device
        self.stop_ids = torch.full((rows, MAX_STOP_TOKEN_IDS), -1, dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(rows, MAX_LOGIT_BIAS, device=device)
        self.in_prompt: Tensor | None = None
        self.output_counts: Tensor | None = None
        self.mask_bits: Tensor | None = None

    @property
    def signature(self) -> tuple[bool, bool]:
        """Which of the tables that are as wide as the vocabulary exist: changes whenever one appears."""
        return self.in_prompt is not None, self.mask_bits is not None

    @staticmethod
    def pack_changes(lists: TokenLists | None, masks: RowMasks | None) -> list[np.ndarray]:
        """The arrays that `apply_changes` takes, in its order."""
        arrays: list[np.ndarray] = []
        if lists is not None:
            for group in (lists.stop, lists.bias, lists.prompt, lists.output):
                arrays += [group.rows, group.columns, group.ids]
            arrays.append(lists.bias_values)
        if masks is not None:
            arrays += [masks.rows, masks.bits.ravel()]
        return arrays

    def clear_rows(self, rows: Tensor) -> None:
        """Rows `[n]` int64 start anew."""
        self.stop_ids.index_fill_(0, rows, -1)
        self.bias_values.index_fill_(0, rows, 0.0)
        if self.in_prompt is not None and self.output_counts is not None:
            self.in_prompt.index_fill_(0, rows, False)
            self.output_counts.index_fill_(0, rows, 0)
        if self.mask_bits is not None:
            self.mask_bits.index_fill_(0, rows, -1)

    def apply_changes(self, lists: TokenLists | None, masks: RowMasks | None, staged: Iterator[Tensor]) -> None:
        """Take over what new rows bring; `staged` yields the arrays of `pack_changes` on the device."""
        if lists is not None:
            stop, bias, prompt, output = (tuple(next(staged).long() for _ in range(3)) for _ in range(4))
            self.stop_ids[stop[0], stop[1]] = stop[2]
            self.bias_ids[bias[0], bias[1]] = bias[2]
            self.bias_values[bias[0], bias[1]] = next(staged)
            if len(lists.prompt.rows):
                # A plain `= True` would copy it from pageable memory, and wait.
                self._seen().index_put_((prompt[0], prompt[2]), torch.ones_like(prompt[2], dtype=torch.bool))
                self.count_tokens(output[0], output[2])
        if masks is not None:
            if self.mask_bits is None:
                self.mask_bits = torch.full(
                    (self._rows, masks.bits.shape[1]), -1, dtype=torch.int32, device=self._device
                )
            rows = next(staged).long()
            self.mask_bits[rows] = next(staged).view(len(masks.rows), -1)

    def _seen(self) -> Tensor:
        """`in_prompt`; from here on both it and `output_counts` exist."""
        if self.in_prompt is None:
            shape = (self._rows, self._vocab)
            # In this order: an interrupt between the two leaves neither in use.
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self.in_prompt

    def process_logits(
        self, logits: Tensor, rows: Tensor, lengths: Tensor, state: RowSettings, features: SamplingFeatures
    ) -> Tensor:
        """New logits: bias, then masks, stop ids below the minimum length, then penalties.

        logits fp32 `[n, vocab]`; rows and lengths (total, before the new token) `[n]`; `state` of the same rows. A row
        is left with at least one token that is not minus infinity. A row may stand there several times. No table is
        made here: one that does not exist yet has nothing to say.
        """
        if features.bias:
            logits = logits.scatter_add(1, self.bias_ids[rows], self.bias_values[rows])
        if features.masks and self.mask_bits is not None:
            logits = logits.masked_fill(~unpack(self.mask_bits[rows], logits.shape[1]), -math.inf)
        if features.min_tokens:
            logits = self._forbid_stop(logits, rows, lengths < state.min_length)
        if features.penalties and self.in_prompt is not None and self.output_counts is not None:
            logits = _penalize(logits, self.in_prompt[rows], self.output_counts[rows], state)
        return logits

    def _forbid_stop(self, logits: Tensor, rows: Tensor, early: Tensor) -> Tensor:
        ids = self.stop_ids[rows]
        # A checkpoint may name a stop token outside its vocabulary: it cannot be chosen anyway.
        known = (ids >= 0) & (ids < logits.shape[1])
        hidden = torch.where(known & early.unsqueeze(1), -math.inf, math.inf)
        masked = logits.scatter_reduce(1, ids.where(known, 0), hidden, "amin")
        # A mask may allow nothing but stop tokens: then it wins over the minimum length.
        empty = masked.amax(dim=-1, keepdim=True) == -math.inf
        return torch.where(empty, logits, masked)

    def count_tokens(self, rows: Tensor, tokens: Tensor) -> None:
        """Note tokens that were chosen, both `[n]` int64. Pairs may repeat; a padding row's counts mean nothing."""
        if self.output_counts is not None:
            ones = torch.ones_like(tokens, dtype=torch.int32)
            # Flat, since a scatter in one dimension adds by atomics, where index_put_ sorts its indices first.
            self.output_counts.view(-1).scatter_add_(0, rows * self._vocab + tokens, ones)


def _penalize(logits: Tensor, in_prompt: Tensor, counts: Tensor, state: RowSettings) -> Tensor:
    """All `[n, vocab]`, `state` `[n]`."""
    in_output = counts > 0
    repetition = state.repetition_penalty.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | in_output, repeated, logits)
    fixed = state.presence_penalty.unsqueeze(1) * in_output
    return logits - fixed - state.frequency_penalty.unsqueeze(1) * counts


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """bits int32 `[n, words]` -> bool `[n, vocab]`."""
    each = bits.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=bits.device)
    return (each & 1).bool().flatten(1)[:, :vocab_size]
