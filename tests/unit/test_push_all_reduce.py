"""All-reduce by stores into peers' memory, with ranks that one process simulates, and with ranks that really wait."""

from __future__ import annotations

import multiprocessing
import random
import time

import pytest
import torch

pytest.importorskip("triton")

from push_cases import EPS, Call, all_reduce, all_reduce_norm, at_rest, fp32_sum, mixed, same_bits, same_values

from rapid_infer.ops.providers.triton.norm import fused_add_rms_norm
from rapid_infer.parallel import push
from rapid_infer.parallel.push import PushBuffers, PushRefused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORLDS = (2, 3, 4, 8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("sum", "two_shot", "norm")


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small messages have several."""
    monkeypatch.setattr(push, "WARPS", 1)


def ranks_of(world_size: int, max_bytes: int = 1 << 14, device: str = DEVICE) -> list[PushBuffers]:
    ranks = PushBuffers.simulated(world_size, max_bytes, device)
    for buffers in ranks:
        buffers.max_polls = 2
    return ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_ways_give_the_fp32_sum_in_rank_order(world_size: int, dtype: torch.dtype) -> None:
    """The same bits on all ranks and in both forms; slots that calls of other shapes have used are clean."""
    ranks = ranks_of(world_size)
    generator = torch.Generator().manual_seed(world_size)
    for rows, size in ((5, 100), (1, 64), (7, 96)) if world_size < 8 else ((5, 100),):
        xs = [mixed(rows, size, dtype, DEVICE, generator) for _ in ranks]
        outs = all_reduce(ranks, xs)
        assert same_values(outs[0], fp32_sum(xs))
        for buffers in ranks:
            buffers.one_shot_bytes = 0
        outs += all_reduce(ranks, xs) if rows > 1 else []
        for buffers in ranks:
            buffers.one_shot_bytes = push.one_shot_bytes(world_size, buffers.max_bytes)
        assert all(same_bits(out, outs[0]) for out in outs)
        assert at_rest(ranks)


@pytest.mark.parametrize("world_size", [2, 4])
def test_zeros_of_either_sign_add_up_to_plus_zero(world_size: int) -> None:
    ranks = ranks_of(world_size)
    for value in (0.0, -0.0):
        xs = [torch.full((2, 64), value, dtype=torch.bfloat16, device=DEVICE) for _ in ranks]
        for out in all_reduce(ranks, xs):
            assert same_bits(out, torch.zeros_like(out))
    assert at_rest(ranks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_norm_after_the_sum_gives_the_bits_of_its_own_kernel(dtype: torch.dtype, in_place: bool) -> None:
    ranks = ranks_of(3)
    generator = torch.Generator().manual_seed(0)
    for rows, size in ((3, 100), (1, 256)):
        xs = [torch.randn(rows, size, generator=generator).to(DEVICE, dtype) for _ in ranks]
        # Rows of mixed values end as NaN, but for the sum before the norm.
        xs[1][0] = mixed(1, size, dtype, DEVICE, generator)
        xs[2][-1] = 0
        residual = torch.randn(rows, size, generator=generator).to(DEVICE, dtype)
        residual[0, ::2] = -0.0
        weight = torch.randn(size, generator=generator).to(DEVICE, dtype)
        want = fused_add_rms_norm(all_reduce(ranks, xs)[0], residual.clone(), weight, EPS)
        residuals = [residual.clone() for _ in ranks]
        into = (xs, residuals) if in_place else ([x.clone() for x in xs], [torch.empty_like(x) for x in xs])
        all_reduce_norm(ranks, xs, residuals, weight, *into)
        for normed, added in zip(*into):
            assert same_bits(normed, want[0])
            assert same_bits(added, want[1])
        assert at_rest(ranks)


@pytest.mark.usefixtures("small_programs")
@pytest.mark.usefixtures("small_programs")
@pytest.mark.parametrize("world_size", WORLDS)
def test_gathered_words_are_every_ranks_in_order(world_size: int) -> None:
    ranks = ranks_of(world_size, 256)
    for shape, dtype in (((3, 2), torch.int32), ((1, 51), torch.float32), ((1, 6), torch.bfloat16)):
        count = torch.arange(shape[0] * shape[1], device=DEVICE).view(shape)
        xs = [(count * (rank - 1) * 37).to(dtype) for rank in range(world_size)]
        xs[0][0, 0] = -1 if dtype == torch.int32 else torch.nan
        outs = [torch.empty((world_size, *shape), dtype=dtype, device=DEVICE) for _ in ranks]
        for stage in push.STAGES:
            for buffers, x, out in zip(ranks, xs, outs):
                push.push_all_gather(buffers, x, out, (stage,))
        bits = torch.stack(xs).view(world_size, -1).view(torch.int32)
        want = bits.where(bits != -(2**31), torch.zeros_like(bits))
        assert all(torch.equal(out.view(world_size, -1).view(torch.int32), want) for out in outs)
        assert at_rest(ranks)


@pytest.mark.parametrize("seed", range(2))
def test_calls_of_changing_shapes_with_late_ranks(seed: int) -> None:
    """A rank may be ahead by whatever the protocol allows: it has ended a call that its peers have yet to collect."""
    draw = random.Random(seed)
    ranks = ranks_of(3, 1 << 11)
    for buffers in ranks:
        # The counter overflows on the way.
        buffers.state[0] = (1 << 31) - 4 * (1 << 16)
    calls = [Call.drawn(KINDS, 3, [2, 3, 5, 9], 40, 100 * seed + n, DEVICE) for n in range(16)]
    stages = len(push.STAGES)
    done = [0] * len(ranks)
    late = 0
    while min(done) < stages * len(calls):
        if draw.random() < 0.1:
            late = draw.randrange(len(ranks))
        able = [
            rank
            for rank, n in enumerate(done)
            if n < stages * len(calls) and (n % stages == 0 or min(done) >= n // stages * stages + n % stages)
        ]
        rank = draw.choice([rank for rank in able if rank != late] or able)
        call, stage = divmod(done[rank], stages)
        calls[call].run(ranks, rank, (push.STAGES[stage],))
        done[rank] += 1
    assert all(call.correct(rank) for call in calls for rank in range(len(ranks)))
    assert at_rest(ranks)


def follow(ranks: list[PushBuffers], rank: int, calls: int) -> None:
    """As one rank of several processes."""
    draw = random.Random(rank)
    for n in range(calls):
        call = Call.drawn(KINDS, len(ranks), [2, 3, 5], 40, n, "cpu")
        if draw.random() < 0.2:
            time.sleep(0.02)
        call.run(ranks, rank)
        assert call.correct(rank), n
    assert not ranks[rank].error.any()


@pytest.mark.usefixtures("small_programs")
@pytest.mark.skipif(DEVICE == "cuda", reason="processes share the memory of a CPU")
def test_ranks_in_processes_wait_for_each_other() -> None:
    size = push.workspace_bytes(2, 1 << 11)
    memory = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(2)]
    ptrs = [m.data_ptr() for m in memory]
    ranks = [PushBuffers(ptrs, m, rank, 2, 1 << 11) for rank, m in enumerate(memory)]
    for buffers in ranks:
        buffers.max_polls = 10_000
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=follow, args=(ranks, rank, 25)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert not any(m.any() for m in memory)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_named_and_not_waited_for(kind: str) -> None:
    ranks = ranks_of(3)
    call = Call.drawn((kind,), 3, [5], 40, 0, DEVICE)
    for stage in push.STAGES:
        for rank in (0, 1):
            call.run(ranks, rank, (stage,))
    assert [int(buffers.error) for buffers in ranks] == [4, 4, 0]
    # The next calls would wait for ever one by one, before the host hears of it.
    ranks[0].max_polls = 1 << 30
    call.run(ranks, 0, push.STAGES)


def test_what_is_too_large_is_refused_before_anything_is_launched() -> None:
    ranks = ranks_of(4, 1024)
    buffers = ranks[0]

    def sums(rows: int) -> torch.Tensor:
        x = torch.ones(rows, 64, device=DEVICE)
        return push.push_all_reduce(buffers, x, x, ())

    sums(4)
    sums(8)
    with pytest.raises(PushRefused, match="2304 bytes"):
        sums(9)
    x = torch.ones(5, 64, device=DEVICE)
    with pytest.raises(PushRefused, match="5 rows of 256 bytes"):
        push.push_all_reduce_add_rms_norm(buffers, x, x, x[0], EPS, x, x)
    with pytest.raises(PushRefused, match="float64"):
        push.push_all_reduce(buffers, x.double(), x.double())
    # Two shots in which the last rank would have nothing to sum.
    buffers.one_shot_bytes = 0
    small = torch.ones(1, 40, device=DEVICE)
    with pytest.raises(PushRefused):
        push.push_all_reduce(buffers, small, small)
    empty = torch.ones(0, 64, device=DEVICE)
    buffers.one_shot_bytes = 1024
    assert push.push_all_reduce(buffers, empty, empty) is empty
    push.push_all_reduce_add_rms_norm(buffers, empty, empty, x[0], EPS, empty, empty)
    assert int(buffers.state[0]) == 0
    assert not buffers.memory.any()


def test_slots_and_limits() -> None:
    assert push.one_shot_bytes(2, 1 << 21) == 1 << 21
    assert push.one_shot_bytes(8, 1 << 21) < push.one_shot_bytes(4, 1 << 21) < 1 << 20
    assert push.one_shot_bytes(8, 1 << 10) == 1 << 10
    with pytest.raises(ValueError, match="multiple of 64"):
        push.workspace_bytes(2, 1000)
    memory = torch.zeros(push.workspace_bytes(2, 1024) - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="memory must be"):
        PushBuffers([0, 0], memory, 0, 2, 1024)
