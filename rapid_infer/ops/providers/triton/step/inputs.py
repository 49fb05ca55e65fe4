"""Both ends of a step. What goes by rows is one program: there are at most some hundreds of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous
from rapid_infer.ops.providers.triton.step.slots import block_of, slot_in
from rapid_infer.ops.step_inputs import MixedInputs, StepLayout

UPDATES_AT_ONCE = 64
TOKENS_AT_ONCE = 32


@triton.jit
def _entry_number(entry, index):
    # The host writes this memory between steps: no cache may answer for it.
    return tl.load(entry + index, cache_modifier=".cv")


@triton.jit
def _entry_array(entry, at, index, mask, other):
    return tl.load(entry + at + index, mask=mask, other=other, cache_modifier=".cv")


@triton.jit
def _apply_updates(entry, at, num_updates, block_tables_ptr, UPDATES: tl.constexpr):
    for first in range(0, num_updates, UPDATES):
        j = first + tl.arange(0, UPDATES)
        there = j < num_updates
        where = _entry_array(entry, at, 2 * j, there, 0)
        block = _entry_array(entry, at, 2 * j + 1, there, 0)
        tl.store(block_tables_ptr + where, block, mask=there)


@triton.jit
def _decode_inputs_kernel(
    ring_ptr, step_ptr, block_tables_ptr, last_token_ptr, length_ptr, rows_ptr,
    input_ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr,
    ring_slots, ring_stride, rows_at, updates_at, table_rows, max_blocks, num_rows, block_size,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, UPDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_previous(PDL)
    entry = ring_ptr + (tl.load(step_ptr) % ring_slots) * ring_stride
    i = tl.arange(0, ROWS)
    inside = i < num_rows
    row = _entry_array(entry, rows_at, i, inside, 0).to(tl.int64)
    _apply_updates(entry, updates_at, _entry_number(entry, 0), block_tables_ptr, UPDATES)
    tl.store(rows_ptr + i, row, mask=inside)
    position = tl.load(length_ptr + row, mask=inside, other=0)
    tl.store(input_ids_ptr + i, tl.load(last_token_ptr + row, mask=inside, other=0), mask=inside)
    tl.store(positions_ptr + i, position, mask=inside)
    tl.store(seq_lens_ptr + i, tl.where(row == table_rows - 1, 0, position + 1).to(tl.int32), mask=inside)
    tl.debug_barrier()
    for group in tl.static_range(GROUPS):
        table_row = group * table_rows + row
        block = block_of(block_tables_ptr, table_row, max_blocks, position, block_size, inside, CACHE=".cg")
        tl.store(slots_ptr + group * num_rows + i, slot_in(block, position, block_size), mask=inside)


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
    """`ring` may be pinned host memory."""
    groups, table_rows, max_blocks = block_tables.shape
    count = len(rows)
    device = rows.device
    input_ids, positions = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    seq_lens = torch.empty(count, dtype=torch.int32, device=device)
    slots = torch.empty(groups, count, dtype=torch.int64, device=device)
    _decode_inputs_kernel[(1,)](
        ring, step, block_tables, last_token, length, rows, input_ids, positions, seq_lens, slots,
        ring.shape[0], ring.stride(0), layout.ROWS, layout.updates, table_rows, max_blocks, count, block_size,
        GROUPS=groups, ROWS=triton.next_power_of_2(count), UPDATES=UPDATES_AT_ONCE, num_warps=4, **options(rows),
    )  # fmt: skip
    return input_ids, positions, seq_lens, slots


@triton.jit
def _mixed_rows_kernel(
    ring_ptr, step_ptr, block_tables_ptr, length_ptr, rows_ptr, query_start_ptr, seq_lens_ptr, decodes_ptr,
    last_ptr, sampled_rows_ptr, sampled_lens_ptr,
    ring_slots, ring_stride, rows_at, query_lens_at, sampled_at, updates_at, max_rows, padding,
    ROWS: tl.constexpr, UPDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_previous(PDL)
    entry = ring_ptr + (tl.load(step_ptr) % ring_slots) * ring_stride
    num_updates, num_rows = _entry_number(entry, 0), _entry_number(entry, 1)
    num_decodes, num_sampled = _entry_number(entry, 3), _entry_number(entry, 4)
    i = tl.arange(0, ROWS)
    real, inside = i < num_rows, i < max_rows
    row = _entry_array(entry, rows_at, i, real, padding).to(tl.int64)
    query_len = _entry_array(entry, query_lens_at, i, real, 0)
    sampled = _entry_array(entry, sampled_at, i, real, 0)
    _apply_updates(entry, updates_at, num_updates, block_tables_ptr, UPDATES)
    end = tl.cumsum(query_len)
    seq_len = (tl.load(length_ptr + row, mask=real, other=0) + query_len).to(tl.int32)
    tl.store(length_ptr + row, (seq_len - sampled).to(tl.int64), mask=real)
    tl.store(rows_ptr + i, row, mask=inside)
    tl.store(seq_lens_ptr + i, seq_len, mask=inside)
    tl.store(query_start_ptr + i, end - query_len, mask=inside)
    tl.store(query_start_ptr + i + 1, end, mask=inside)
    tl.store(decodes_ptr, num_decodes)
    # Sampled rows move to the front, in their order; what is left there is padding.
    unused = (i >= num_sampled) & inside
    tl.store(last_ptr + i, tl.zeros_like(row), mask=unused)
    tl.store(sampled_rows_ptr + i, tl.zeros_like(row) + padding, mask=unused)
    tl.store(sampled_lens_ptr + i, tl.zeros_like(seq_len) + 1, mask=unused)
    to = tl.cumsum(sampled) - 1
    tl.store(last_ptr + to, (end - 1).to(tl.int64), mask=sampled > 0)
    tl.store(sampled_rows_ptr + to, row, mask=sampled > 0)
    tl.store(sampled_lens_ptr + to, seq_len, mask=sampled > 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _mixed_tokens_kernel(
    ring_ptr, step_ptr, block_tables_ptr, last_token_ptr, rows_ptr, query_start_ptr, seq_lens_ptr,
    input_ids_ptr, positions_ptr, slots_ptr, token_mask_ptr,
    ring_slots, ring_stride, tokens_at, max_rows, table_rows, max_blocks, num_tokens, block_size,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_previous(PDL)
    entry = ring_ptr + (tl.load(step_ptr) % ring_slots) * ring_stride
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    known = _entry_array(entry, tokens_at, token, token < _entry_number(entry, 2), 0)
    i = tl.arange(0, ROWS)
    end = tl.load(query_start_ptr + 1 + i, mask=i < max_rows, other=2147483647)
    nth = tl.sum((end[None, :] <= token[:, None]).to(tl.int32), axis=1)
    real = nth < max_rows
    row = tl.load(rows_ptr + nth, mask=real, other=0)
    to_go = tl.load(query_start_ptr + nth + 1, mask=real, other=0) - token
    position = tl.where(real, tl.load(seq_lens_ptr + nth, mask=real, other=0) - to_go, 0).to(tl.int64)
    inside = token < num_tokens
    newest = tl.load(last_token_ptr + row, mask=real, other=0)
    tl.store(input_ids_ptr + token, tl.where(known < 0, newest, known.to(tl.int64)), mask=inside)
    tl.store(positions_ptr + token, position, mask=inside)
    tl.store(token_mask_ptr + token, real.to(tl.int32), mask=inside)
    for group in tl.static_range(GROUPS):
        block = block_of(block_tables_ptr, group * table_rows + row, max_blocks, position, block_size, real, CACHE="")
        slot = tl.where(real, slot_in(block, position, block_size), 0)
        tl.store(slots_ptr + group * num_tokens + token, slot, mask=inside)


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
    """`ring` may be pinned host memory."""
    groups, table_rows, max_blocks = block_tables.shape
    count, device = layout.max_rows, length.device

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    made = MixedInputs(
        input_ids=empty(num_tokens),
        positions=empty(num_tokens),
        slots=empty(groups, num_tokens),
        token_mask=empty(num_tokens, dtype=torch.int32),
        rows=empty(count),
        query_start=empty(count + 1, dtype=torch.int32),
        seq_lens=empty(count, dtype=torch.int32),
        decodes=empty(1, dtype=torch.int32),
        last=empty(count),
        sampled_rows=empty(count),
        sampled_lens=empty(count, dtype=torch.int32),
    )
    padded = triton.next_power_of_2(count)
    _mixed_rows_kernel[(1,)](
        ring, step, block_tables, length, made.rows, made.query_start, made.seq_lens, made.decodes,
        made.last, made.sampled_rows, made.sampled_lens, ring.shape[0], ring.stride(0),
        layout.ROWS, layout.query_lens, layout.sampled, layout.updates, count, table_rows - 1,
        ROWS=padded, UPDATES=UPDATES_AT_ONCE, num_warps=4, **options(length),
    )  # fmt: skip
    _mixed_tokens_kernel[(triton.cdiv(num_tokens, TOKENS_AT_ONCE),)](
        ring, step, block_tables, last_token, made.rows, made.query_start, made.seq_lens,
        made.input_ids, made.positions, made.slots, made.token_mask, ring.shape[0], ring.stride(0),
        layout.tokens, count, table_rows, max_blocks, num_tokens, block_size,
        GROUPS=groups, ROWS=padded, TOKENS=TOKENS_AT_ONCE, num_warps=4, **options(length),
    )  # fmt: skip
    return made


@triton.jit
def _commit_tokens_kernel(
    rows_ptr, tokens_ptr, finite_if_valid_ptr, last_token_ptr, length_ptr, results_ptr, step_ptr,
    slots, results_stride, num_rows, padding_row, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_previous(PDL)
    i = tl.arange(0, ROWS)
    inside = i < num_rows
    step = tl.load(step_ptr)
    row = tl.load(rows_ptr + i, mask=inside, other=0)
    token = tl.load(tokens_ptr + i, mask=inside, other=0)
    value = tl.load(finite_if_valid_ptr + i, mask=inside, other=0.0)
    # NaN fails every comparison.
    valid = tl.abs(value) < float("inf")
    result = tl.where(valid, token, -1).to(tl.int32)
    tl.store(results_ptr + (step % slots) * results_stride + i, result, mask=inside)
    real = inside & (row != padding_row)
    tl.store(last_token_ptr + row, tl.where(valid, token, 0), mask=real)
    length = tl.load(length_ptr + row, mask=real, other=0)
    tl.store(length_ptr + row, length + 1, mask=real)
    tl.debug_barrier()
    tl.store(step_ptr, step + 1)


def commit_tokens(
    rows: Tensor,
    tokens: Tensor,
    finite_if_valid: Tensor,
    last_token: Tensor,
    length: Tensor,
    results: Tensor,
    step: Tensor,
) -> None:
    """`results` may be pinned host memory."""
    count = len(rows)
    _commit_tokens_kernel[(1,)](
        rows, tokens, finite_if_valid, last_token, length, results, step,
        results.shape[0], results.stride(0), count, len(last_token) - 1,
        ROWS=triton.next_power_of_2(count), num_warps=4, **options(rows),
    )  # fmt: skip
