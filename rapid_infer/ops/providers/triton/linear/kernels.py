"""Matrix products of few tokens, bound by reading the weight once: with tensor cores, and with plain arithmetic.

A program computes BLOCK_N outputs of all rows over one of SPLITS pieces of K. Of several pieces, the program that comes
last adds the partial sums in their order, so that results do not depend on timing. Weights never change, so they may be
fetched before the kernel ahead has ended; everything else only after `wait_previous`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid_infer.ops.providers.triton.launch import start_next, wait_previous

_FIXED = ["M", "iters"]
"""Arguments whose value must not make another kernel."""


@triton.jit
def prefetch(weight_ptr, rows, K, start, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr):
    """Ask for LINES lines of 128 bytes (LINE elements) of each weight row, from `start` on, into L2."""
    if PDL and LINES > 0:
        column = tl.minimum(start + tl.arange(0, LINES) * LINE, K - LINE)
        address = (weight_ptr + rows[:, None] * K + column[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 128; // dummy $0", "=r,l", [address],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _write(
    acc, up, out_ptr, index_ptr, m, n, M, N, block,
    BLOCK_N: tl.constexpr, GATED: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """The end of a program: acc, up fp32 `[rows, BLOCK_N]` to out `[M, N]`, or the best column to out `[M, blocks]`."""
    if ARGMAX:
        # NaN loses every comparison; as infinity it wins, and the caller sees a value that is not finite.
        value = tl.where(acc != acc, float("inf"), acc)
        value = tl.where((n < N)[None, :], value, float("-inf"))
        best, at = tl.max(value, axis=1, return_indices=True)
        to = m * tl.num_programs(0) + block
        tl.store(out_ptr + to, best, mask=m < M)
        tl.store(index_ptr + to, block * BLOCK_N + at, mask=m < M)
    else:
        if GATED:
            acc = acc * tl.sigmoid(acc) * up
        inside = (m < M)[:, None] & (n < N)[None, :]
        tl.store(out_ptr + m[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    acc, up, out_ptr, index_ptr, partial_ptr, semaphore_ptr, m, n, M, N,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """Add the splits' sums, `[SPLITS, M, N]` in the workspace and after them those of `up`, and write the outputs."""
    block = tl.program_id(0)
    if SPLITS == 1:
        _write(acc, up, out_ptr, index_ptr, m, n, M, N, block, BLOCK_N, GATED, ARGMAX)
    else:
        inside = (m < M)[:, None] & (n < N)[None, :]
        at = m[:, None] * N + n[None, :]
        size = M * N
        mine = partial_ptr + tl.program_id(1) * size + at
        tl.store(mine, acc, mask=inside)
        if GATED:
            tl.store(mine + SPLITS * size, up, mask=inside)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        arrived = tl.atomic_add(semaphore_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total, total_up = tl.zeros_like(acc), tl.zeros_like(acc)
            for split in tl.static_range(SPLITS):
                theirs = partial_ptr + split * size + at
                total += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(theirs + SPLITS * size, mask=inside, other=0.0, cache_modifier=".cg")
            _write(total, total_up, out_ptr, index_ptr, m, n, M, N, block, BLOCK_N, GATED, ARGMAX)
            tl.store(semaphore_ptr + block, 0)


@triton.jit
def _weight(
    weight_ptr, tiles, rows, row, k, start, K, TMA: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """`[BLOCK_N, BLOCK_K]` of the weight: rows `rows`, which begin at `row`, columns `k`, which begin at `start`."""
    if TMA:
        tile = tiles.load([row, start])
    elif EVEN_K:
        tile = tl.load(weight_ptr + rows[:, None] * K + k[None, :])
    else:
        tile = tl.load(weight_ptr + rows[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
    return tile.to(tl.float32) if WIDE else tile


@triton.jit
def _product(x, tile, acc, WEIGHT_FIRST: tl.constexpr):
    """acc + x tile^T, or its transpose."""
    if WEIGHT_FIRST:
        acc = tl.dot(tile, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(tile), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=_FIXED)
def dot_kernel(
    x_ptr, weight_ptr, tiles, out_ptr, index_ptr, partial_ptr, semaphore_ptr, M, N, K, x_stride, iters,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, ARGMAX: tl.constexpr, EVEN_K: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WEIGHT_FIRST computes the transposed product: wgmma wants 64 rows on the left, which few tokens do not fill.

    `tiles` is the weight's TMA descriptor. WIDE: multiply in fp32, for the interpreter.
    """
    start_next(PDL)
    row = tl.program_id(0) * BLOCK_N
    first = tl.program_id(1) * iters * BLOCK_K
    n = row + tl.arange(0, BLOCK_N)
    # Rows past the end are read again rather than masked: their results are not stored.
    rows = tl.minimum(n, N - 1).to(tl.int64)
    prefetch(weight_ptr, rows, K, first, LINES, LINE, PDL)
    if GATED:
        prefetch(weight_ptr, rows + N, K, first, LINES, LINE, PDL)
    wait_previous(PDL)
    m = tl.arange(0, ROWS)
    x_row = x_ptr + m[:, None].to(tl.int64) * x_stride
    if WEIGHT_FIRST:
        acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    up = acc
    for i in tl.range(0, iters, num_stages=STAGES):
        start = first + i * BLOCK_K
        k = start + tl.arange(0, BLOCK_K)
        used = (m < M)[:, None]
        if not EVEN_K:
            used = used & (k < K)[None, :]
        x = tl.load(x_row + k[None, :], mask=used, other=0.0)
        if WIDE:
            x = x.to(tl.float32)
        tile = _weight(weight_ptr, tiles, rows, row, k, start, K, TMA, EVEN_K, WIDE)
        acc = _product(x, tile, acc, WEIGHT_FIRST)
        if GATED:
            tile = _weight(weight_ptr, tiles, rows + N, row + N, k, start, K, TMA, EVEN_K, WIDE)
            up = _product(x, tile, up, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        acc, up = tl.trans(acc), tl.trans(up)
    finish(
        acc, up, out_ptr, index_ptr, partial_ptr, semaphore_ptr, m, n, M, N, BLOCK_N, SPLITS, GATED, ARGMAX
    )  # fmt: skip


@triton.jit(do_not_specialize=_FIXED)
def gemv_kernel(
    x_ptr, weight_ptr, tiles, out_ptr, index_ptr, partial_ptr, semaphore_ptr, M, N, K, x_stride, iters,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
    GATED: tl.constexpr, ARGMAX: tl.constexpr, EVEN_K: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token. Without LOOP a program's whole piece of the weight is in registers at once. EARLY: load the first
    tile ahead of the wait.
    """
    start_next(PDL)
    first = tl.program_id(1) * iters * BLOCK_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    k = first + tl.arange(0, BLOCK_K)
    if not EARLY:
        wait_previous(PDL)
    tile = _weight(weight_ptr, tiles, rows, 0, k, first, K, False, EVEN_K, True)
    tile_up = tile
    if GATED:
        tile_up = _weight(weight_ptr, tiles, rows + N, 0, k, first, K, False, EVEN_K, True)
    if EARLY:
        wait_previous(PDL)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    acc, up = tile * x, tile_up * x
    if LOOP:
        for i in tl.range(1, iters, num_stages=STAGES):
            k = first + i * BLOCK_K + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
            acc += _weight(weight_ptr, tiles, rows, 0, k, 0, K, False, EVEN_K, True) * x
            if GATED:
                up += _weight(weight_ptr, tiles, rows + N, 0, k, 0, K, False, EVEN_K, True) * x
    total = tl.sum(acc, axis=1)[None, :]
    total_up = total
    if GATED:
        total_up = tl.sum(up, axis=1)[None, :]
    finish(
        total, total_up, out_ptr, index_ptr, partial_ptr, semaphore_ptr, tl.arange(0, 1), n, M, N,
        BLOCK_N, SPLITS, GATED, ARGMAX,
    )  # fmt: skip


@triton.jit
def block_best_kernel(scores_ptr, value_ptr, index_ptr, N, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The best of each BLOCK columns of scores fp32 `[rows, N]`; value, index `[rows, blocks]`."""
    start_next(PDL)
    block, row = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK + tl.arange(0, BLOCK)
    wait_previous(PDL)
    scores = tl.load(scores_ptr + row.to(tl.int64) * stride + n, mask=n < N, other=float("-inf"))
    value = tl.where(scores != scores, float("inf"), scores)
    best, at = tl.max(value, axis=0, return_indices=True)
    to = row * tl.num_programs(0) + block
    tl.store(value_ptr + to, best)
    tl.store(index_ptr + to, block * BLOCK + at)


@triton.jit
def best_kernel(value_ptr, index_ptr, best_ptr, token_ptr, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The best block of each row: best fp32 `[rows]`, token int64 `[rows]`, the lowest among equals."""
    start_next(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    wait_previous(PDL)
    value = tl.load(value_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    # Blocks stand in the order of their columns: the first of the best has the lowest.
    best, at = tl.max(value, axis=0, return_indices=True)
    tl.store(best_ptr + row, best)
    tl.store(token_ptr + row, tl.load(index_ptr + row * blocks + at).to(tl.int64))
