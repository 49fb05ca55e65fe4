"""Both ends of a decode step, one program each: a step has at most a few hundred rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.ops.providers.triton.launch import options, start_next, wait_previous

UPDATES_AT_ONCE = 64


@triton.jit
def _decode_inputs_kernel(
    mail_ptr, step_ptr, block_tables_ptr, last_token_ptr, length_ptr, rows_ptr,
    input_ids_ptr, positions_ptr, seq_lens_ptr, slots_ptr,
    mail_slots, mail_stride, max_rows, table_rows, max_blocks, num_rows, block_size,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, UPDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_previous(PDL)
    # The host writes this memory between steps: no cache may answer for it.
    letter = mail_ptr + (tl.load(step_ptr) % mail_slots) * mail_stride
    i = tl.arange(0, ROWS)
    inside = i < num_rows
    row = tl.load(letter + 1 + i, mask=inside, other=0, cache_modifier=".cv").to(tl.int64)
    num_updates = tl.load(letter, cache_modifier=".cv")
    for first in range(0, num_updates, UPDATES):
        j = first + tl.arange(0, UPDATES)
        pair = letter + 1 + max_rows + 2 * j
        where = tl.load(pair, mask=j < num_updates, other=0, cache_modifier=".cv")
        block = tl.load(pair + 1, mask=j < num_updates, other=0, cache_modifier=".cv")
        tl.store(block_tables_ptr + where, block, mask=j < num_updates)
    tl.store(rows_ptr + i, row, mask=inside)
    position = tl.load(length_ptr + row, mask=inside, other=0)
    tl.store(input_ids_ptr + i, tl.load(last_token_ptr + row, mask=inside, other=0), mask=inside)
    tl.store(positions_ptr + i, position, mask=inside)
    tl.store(seq_lens_ptr + i, tl.where(row == table_rows - 1, 0, position + 1).to(tl.int32), mask=inside)
    tl.debug_barrier()
    for group in tl.static_range(GROUPS):
        at = block_tables_ptr + (group * table_rows + row) * max_blocks + position // block_size
        block = tl.load(at, mask=inside, other=0, cache_modifier=".cg").to(tl.int64)
        tl.store(slots_ptr + group * num_rows + i, block * block_size + position % block_size, mask=inside)


def decode_inputs(
    mail: Tensor,
    step: Tensor,
    block_tables: Tensor,
    last_token: Tensor,
    length: Tensor,
    rows: Tensor,
    max_rows: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mail` may be pinned host memory."""
    groups, table_rows, max_blocks = block_tables.shape
    count = len(rows)
    device = rows.device
    input_ids, positions = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    seq_lens = torch.empty(count, dtype=torch.int32, device=device)
    slots = torch.empty(groups, count, dtype=torch.int64, device=device)
    _decode_inputs_kernel[(1,)](
        mail, step, block_tables, last_token, length, rows, input_ids, positions, seq_lens, slots,
        mail.shape[0], mail.stride(0), max_rows, table_rows, max_blocks, count, block_size,
        GROUPS=groups, ROWS=triton.next_power_of_2(count), UPDATES=UPDATES_AT_ONCE, num_warps=4, **options(rows),
    )  # fmt: skip
    return input_ids, positions, seq_lens, slots


@triton.jit
def _commit_tokens_kernel(
    rows_ptr, tokens_ptr, best_ptr, last_token_ptr, length_ptr, results_ptr, step_ptr,
    slots, results_stride, num_rows, padding_row, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_previous(PDL)
    i = tl.arange(0, ROWS)
    inside = i < num_rows
    step = tl.load(step_ptr)
    row = tl.load(rows_ptr + i, mask=inside, other=0)
    token = tl.load(tokens_ptr + i, mask=inside, other=0)
    best = tl.load(best_ptr + i, mask=inside, other=0.0)
    # NaN fails every comparison.
    fine = tl.abs(best) < float("inf")
    result = tl.where(fine, token, -1).to(tl.int32)
    tl.store(results_ptr + (step % slots) * results_stride + i, result, mask=inside)
    real = inside & (row != padding_row)
    tl.store(last_token_ptr + row, tl.where(fine, token, 0), mask=real)
    length = tl.load(length_ptr + row, mask=real, other=0)
    tl.store(length_ptr + row, length + 1, mask=real)
    tl.debug_barrier()
    tl.store(step_ptr, step + 1)


def commit_tokens(
    rows: Tensor, tokens: Tensor, best: Tensor, last_token: Tensor, length: Tensor, results: Tensor, step: Tensor
) -> None:
    """`results` may be pinned host memory."""
    count = len(rows)
    _commit_tokens_kernel[(1,)](
        rows, tokens, best, last_token, length, results, step,
        results.shape[0], results.stride(0), count, len(last_token) - 1,
        ROWS=triton.next_power_of_2(count), num_warps=4, **options(rows),
    )  # fmt: skip
