"""The attention kernel for SM 90: which pages of keys an item takes, and the warp that copies them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from rapid_infer.ops.providers.triton.attention import prefill_config

PAGE = gl.constexpr(prefill_config.PAGE)
"""Keys that are copied at once."""
LONG = gl.constexpr(8)
"""Pages that all tokens see from which on they are taken in pairs."""


@gluon.jit
def place(n, STAGES: gl.constexpr):
    """(stage, phase of its barriers) of the n-th use. Unsigned, since divisions are cheaper then."""
    n = n.to(gl.uint32)
    return (n % STAGES).to(gl.int32), (n // STAGES & 1).to(gl.int32)


@gluon.jit
def span(first_position, tokens, window, WINDOW: gl.constexpr):
    """(pages, masked, begin, entered, alone) of an item whose first of `tokens` tokens stands at `first_position`.

    Its keys lie on `pages` pages, taken from the last to page `begin`, before which a window lets no token look. On
    `masked` pages there are keys that a token must not see yet, and on those before page `entered` some that the window
    has left. The first `alone` pages are taken one by one and the others in pairs, which is less to do for each key.
    """
    pages = (first_position + tokens + PAGE - 1) // PAGE
    begin = first_position * 0
    entered = begin
    full = (first_position + 1) // PAGE
    if WINDOW:
        begin = gl.maximum(first_position - window + 1, 0) // PAGE
        entered = gl.minimum((gl.maximum(first_position + tokens - window, 0) + PAGE - 1) // PAGE, pages)
        full = gl.maximum(full, entered)
    masked = gl.maximum(pages - full, 1)
    alone = pages - begin
    if not WINDOW:  # noqa: SIM102 (known when compiled; the other is not)
        if pages - masked >= LONG:
            alone = masked + (pages - masked) % 2
    return pages, masked, begin, entered, alone


@gluon.jit
def _put(queue, ready, free, n, value):
    """The n-th of the program's items, for both warpgroups."""
    at, phase = place(n, 2)
    mbarrier.wait(free.index(at), phase ^ 1)
    queue.index(at).store(gl.full([1], value, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    gl.thread_barrier()
    mbarrier.arrive(ready.index(at), count=1)


@gluon.jit
def take(queue, ready, free, n):
    at, phase = place(n, 2)
    mbarrier.wait(ready.index(at), phase)
    value = gl.max(queue.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    gl.thread_barrier()
    mbarrier.arrive(free.index(at), count=1)
    return value


@gluon.jit
def _find(table, page, keys, BLOCK_SIZE: gl.constexpr):
    """(block, slot) of a page. What lies past the last key is left out as `attend_pages` does."""
    first = page * PAGE
    return gl.load(table + first // BLOCK_SIZE), first % BLOCK_SIZE - gl.maximum(first + PAGE - keys, 0)


@gluon.jit
def _copy(tiles, bufs, ready, free, n, block, slot, block_2, slot_2, column, pair, STAGES: gl.constexpr):
    stage, phase = place(n, STAGES)
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(ready.index(stage), tiles.block_type.nbytes, pred=not pair)
    mbarrier.expect(ready.index(stage), 2 * tiles.block_type.nbytes, pred=pair)
    tma.async_copy_global_to_shared(tiles, [block, slot, column], ready.index(stage), bufs.index(2 * stage))
    tma.async_copy_global_to_shared(
        tiles, [block_2, slot_2, column], ready.index(stage), bufs.index(2 * stage + 1), pred=pair
    )


@gluon.jit
def _copy_steps(
    i, stop, base, k_tiles, v_tiles, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, table, column, pages, alone,
    keys, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The pages of an item's steps from the `i`-th up to `stop`; it has `base` steps before it."""
    for n in range(i, stop):
        pair = n >= alone
        page = pages - 1 - n - gl.maximum(n - alone, 0)
        block, slot = _find(table, page, keys, BLOCK_SIZE)
        block_2, slot_2 = _find(table, gl.maximum(page - 1, 0), keys, BLOCK_SIZE)
        _copy(k_tiles, k_bufs, k_ready, k_free, base + n, block, slot, block_2, slot_2, column, pair, STAGES)
        _copy(v_tiles, v_bufs, v_ready, v_free, base + n, block, slot, block_2, slot_2, column, pair, STAGES)


@gluon.jit
def copy_partition(
    k_tiles, v_tiles, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, queue, queue_ready, queue_free,
    table_ptr, plan_ptr, table_stride, item, items, window,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, ENTRY: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Copies the keys of each item, the last first, and says which one comes next."""
    base = item * 0
    done = item * 0
    while item < items:
        entry = plan_ptr + item // HEADS * ENTRY
        column = item % HEADS * DIM
        tokens = gl.load(entry + 1)
        keys = gl.load(entry + 3)
        table = table_ptr + gl.load(entry + 4).to(gl.int64) * table_stride
        pages, _, begin, _, alone = span(gl.load(entry + 2), tokens, window, WINDOW)
        steps = gl.where(tokens > 0, alone + (pages - begin - alone) // 2, 0)
        _copy_steps(
            0, gl.minimum(steps, 1), base, k_tiles, v_tiles, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, table,
            column, pages, alone, keys, BLOCK_SIZE, STAGES,
        )  # fmt: skip
        # Answered while the first pages are on their way.
        asked = gl.atomic_add(plan_ptr + 7, 1)
        # As many items are asked for as there are, since each program begins with one that it has not asked for.
        if asked == items - 1:
            gl.store(plan_ptr + 7, 0)
        item = gl.num_programs(0) + asked
        _put(queue, queue_ready, queue_free, done, item)
        _copy_steps(
            1, steps, base, k_tiles, v_tiles, k_bufs, v_bufs, k_ready, v_ready, k_free, v_free, table,
            column, pages, alone, keys, BLOCK_SIZE, STAGES,
        )  # fmt: skip
        base += steps
        done += 1
