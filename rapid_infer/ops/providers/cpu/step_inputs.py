"""Both ends of a step where host and device are one: numpy over the same memory costs a third of torch's operators."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rapid_infer.cache.slots import slots_of
from rapid_infer.ops import register
from rapid_infer.ops.providers.cpu.supports import not_on_cpu
from rapid_infer.ops.step_inputs import MixedInputs, StepLayout


def _read_entry(ring: Tensor, step: Tensor, block_tables: Tensor, layout: StepLayout) -> tuple[np.ndarray, np.ndarray]:
    """The step's entry in the ring, and the block tables with its updates."""
    entry, tables = ring.numpy()[int(step) % len(ring)], block_tables.numpy()
    if updates := int(entry[StepLayout.NUM_UPDATES]):
        pairs = entry[layout.updates : layout.updates + 2 * updates]
        tables.reshape(-1)[pairs[::2]] = pairs[1::2]
    return entry, tables


@register("decode_inputs", "cpu", priority=10, supports=not_on_cpu, capturable=False)
def decode_inputs(
    ring: Tensor,
    step: Tensor,
    block_tables: Tensor,
    last_token: Tensor,
    length: Tensor,
    rows: Tensor,
    layout: StepLayout,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    entry, tables = _read_entry(ring, step, block_tables, layout)
    numbers = rows.numpy()
    numbers[:] = entry[StepLayout.ROWS : StepLayout.ROWS + len(rows)]
    positions = length.numpy()[numbers]
    seq_lens = ((positions + 1) * (numbers != tables.shape[1] - 1)).astype(np.int32)
    made = last_token.numpy()[numbers], positions, seq_lens, slots_of(tables, numbers, positions, block_size)
    ids, positions_, lengths, slots = map(torch.from_numpy, made)
    return ids, positions_, lengths, slots


@register("mixed_inputs", "cpu", priority=10, supports=not_on_cpu, capturable=False)
def mixed_inputs(
    ring: Tensor,
    step: Tensor,
    block_tables: Tensor,
    last_token: Tensor,
    length: Tensor,
    num_tokens: int,
    layout: StepLayout,
    block_size: int,
) -> MixedInputs:
    entry, tables = _read_entry(ring, step, block_tables, layout)
    n, total, _, sampled = entry[StepLayout.NUM_ROWS : StepLayout.ROWS].tolist()
    max_rows, padding, lengths = layout.max_rows, tables.shape[1] - 1, length.numpy()
    rows = np.full(max_rows, padding, np.int64)
    rows[:n] = entry[StepLayout.ROWS : StepLayout.ROWS + n]
    query_lens = entry[layout.query_lens : layout.query_lens + n]
    query_start = np.full(max_rows + 1, total, np.int32)
    query_start[0] = 0
    np.cumsum(query_lens, out=query_start[1 : n + 1])
    seq_lens = np.zeros(max_rows, np.int32)
    seq_lens[:n] = lengths[rows[:n]] + query_lens
    lengths[rows[:n]] = seq_lens[:n] - entry[layout.sampled : layout.sampled + n]

    row_of = np.repeat(np.arange(n), query_lens)
    owner = rows[row_of]
    place = np.arange(total) + (seq_lens[:n] - query_start[1 : n + 1])[row_of]
    known = entry[layout.tokens : layout.tokens + total]
    input_ids, positions = np.zeros((2, num_tokens), np.int64)
    input_ids[:total] = np.where(known >= 0, known, last_token.numpy()[owner])
    positions[:total] = place
    slots = np.zeros((len(tables), num_tokens), np.int64)
    slots[:, :total] = slots_of(tables, owner, place, block_size)
    token_mask = np.zeros(num_tokens, np.int32)
    token_mask[:total] = 1

    chosen = np.flatnonzero(entry[layout.sampled : layout.sampled + n])
    last, sampled_rows = np.zeros(max_rows, np.int64), np.full(max_rows, padding, np.int64)
    sampled_lens = np.ones(max_rows, np.int32)
    last[:sampled], sampled_rows[:sampled] = query_start[chosen + 1] - 1, rows[chosen]
    sampled_lens[:sampled] = seq_lens[chosen]
    decodes = entry[StepLayout.NUM_DECODES : StepLayout.NUM_DECODES + 1].copy()
    of_tokens, of_rows = (input_ids, positions, slots, token_mask), (rows, query_start, seq_lens)
    return MixedInputs(*map(torch.from_numpy, (*of_tokens, *of_rows, decodes, last, sampled_rows, sampled_lens)))


@register("commit_tokens", "cpu", priority=10, supports=not_on_cpu, capturable=False)
def commit_tokens(
    rows: Tensor,
    tokens: Tensor,
    finite_if_valid: Tensor,
    last_token: Tensor,
    length: Tensor,
    results: Tensor,
    step: Tensor,
) -> None:
    numbers, ids, valid = rows.numpy(), tokens.numpy(), np.isfinite(finite_if_valid.numpy())
    results.numpy()[int(step) % len(results), : len(rows)] = np.where(valid, ids, -1)
    real = numbers != len(last_token) - 1
    numbers = numbers[real]
    last_token.numpy()[numbers] = (ids * valid)[real]
    length.numpy()[numbers] += 1
    step.numpy()[0] += 1
