"""All-reduce by stores into peers' memory: kernels of simulated ranks wait for each other on one GPU.

Up to eight streams must run at once. Where others have started CUDA before this file sets what follows, set
CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment.
"""

from __future__ import annotations

import os
import random

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch

pytest.importorskip("triton")

from push_cases import EPS, all_reduce, all_reduce_norm, at_rest, mixed, same_bits
from push_ranks import Call, Ranks, run_calls

from rapid_infer.ops.providers.triton.norm import fused_add_rms_norm
from rapid_infer.parallel import push
from rapid_infer.parallel.push import PushBuffers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("sum", "norm", "two_shot")
CALLS = 10_000


@pytest.fixture(params=[False, True], ids=["ordinary", "pdl"])
def pdl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(push, "options", lambda x: {"PDL": False})
    elif torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs SM 90")
    return request.param


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_many_calls_of_changing_shapes_with_late_ranks(world_size: int, pdl: bool) -> None:
    """Replayed graphs and eager calls in turn, their sequence the same on all ranks, one of which is late at random."""
    draw = random.Random(world_size)
    ranks = Ranks(world_size, 1 << 16)
    segments = []
    # Few to compile; the last with rows that are not aligned.
    for n, (dtype, size) in enumerate([(torch.bfloat16, 512), (torch.float32, 512), (torch.bfloat16, 120)] * 2):
        kinds = [*draw.sample(KINDS, 3), draw.choice(KINDS)]
        segments.append(
            [
                Call(kind, world_size, draw.choice((1, 2, 3, 5, 8)), size, dtype, 4 * n + k)
                for k, kind in enumerate(kinds)
            ]
        )
    graphs = []
    for calls in segments:
        late = draw.randrange(world_size)

        def run(rank: int, calls: list[Call] = calls, late: int = late) -> None:
            if rank == late:
                torch.cuda._sleep(20_000)
            run_calls(ranks, rank, calls)
            run_calls(ranks, rank, calls[::-1])

        ranks.warm_up(run)
        graphs.append(ranks.capture(run))
    # Captures have emptied the allocator.
    ranks.warm_up(lambda rank: [run_calls(ranks, rank, calls) for calls in segments])
    made = 0
    while made < CALLS:
        for _ in range(50):
            n = draw.randrange(len(segments))
            eager = draw.random() < 0.1
            late = draw.randrange(2 * world_size)
            for rank in draw.sample(range(world_size), world_size):
                with torch.cuda.stream(ranks.streams[rank]):
                    if rank == late:
                        torch.cuda._sleep(draw.choice((2_000, 50_000, 500_000)))
                    if eager:
                        run_calls(ranks, rank, segments[n])
                    else:
                        graphs[n][rank].replay()
            made += 4 if eager else 8
        ranks.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_model_sizes_give_the_bits_of_the_operators_one_by_one(world_size: int, dtype: torch.dtype) -> None:
    """Without waits: each stage on all ranks before the next, on one stream."""
    ranks = PushBuffers.simulated(world_size, 1 << 21, "cuda")
    generator = torch.Generator().manual_seed(0)
    for rows, size in ((1, 4096), (7, 2048), (3, 5120), (5, 7168), (4, 1000)):
        xs = [torch.randn(rows, size, generator=generator).to("cuda", dtype) for _ in ranks]
        xs[0][-1] = mixed(1, size, dtype, "cuda", generator)
        residual, weight = (torch.randn(n, size, generator=generator).to("cuda", dtype) for n in (rows, 1))
        sums = all_reduce(ranks, xs)
        want = fused_add_rms_norm(sums[0].clone(), residual.clone(), weight[0], EPS)
        outs, added = ([torch.empty_like(x) for x in xs] for _ in range(2))
        all_reduce_norm(ranks, xs, [residual] * world_size, weight[0], outs, added)
        for buffers in ranks:
            buffers.one_shot_bytes = 0
        two_shot = all_reduce(ranks, xs)
        for buffers in ranks:
            buffers.one_shot_bytes = buffers.max_bytes
        for rank in range(world_size):
            assert same_bits(sums[rank], sums[0])
            assert same_bits(two_shot[rank], sums[0])
            assert same_bits(outs[rank], want[0])
            assert same_bits(added[rank], want[1])
    assert at_rest(ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_named_and_the_gpu_goes_on(kind: str, pdl: bool) -> None:
    ranks = Ranks(3, 1 << 16)
    call = Call(kind, 3, 4, 512, torch.bfloat16, 0)
    for rank, buffers in enumerate(ranks.buffers[:2]):
        buffers.max_polls = 1000
        with torch.cuda.stream(ranks.streams[rank]):
            call.launch(buffers, call.xs[rank][0])
    torch.cuda.synchronize()
    # By bits; rank 1 may be late for rank 0, too, since it is launched later.
    errors = [int(buffers.error) for buffers in ranks.buffers]
    assert errors[0] & 4
    assert errors[1] & 4
    assert errors[2] == 0
