"""The Triton providers of sampling against their references, with blocks small enough that every path is met."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from rapid_infer import ops  # noqa: E402
from rapid_infer.engine.row_fields import SamplingFeatures  # noqa: E402
from rapid_infer.ops import noise  # noqa: E402
from rapid_infer.ops.providers.triton.sampling import gumbel_argmax, truncate  # noqa: E402
from rapid_infer.worker.row_settings import RowSettings  # noqa: E402
from rapid_infer.worker.sample import SamplingOps, sample_logits  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = math.inf
TRITON = SamplingOps(truncate.truncate_logits, gumbel_argmax.gumbel_argmax)
SMALL = {"GROUP": 4, "LANES": 16, "AIM": 32, "ROOM": 64, "FEW": 16, "STEP": 8, "BLOCK": 64}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred tokens then have many blocks, and more candidates than there is room for."""
    for name, value in SMALL.items():
        monkeypatch.setattr(truncate, name, value)
    monkeypatch.setattr(gumbel_argmax, "BLOCK", 64)


def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def compare(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None = None) -> None:
    """Both keep the same tokens; a row with top_p may have one more or less at its very edge.

    The reference sums in fp64 here: its fp32 sums along a row of 20000 are off by more than a token.
    """
    wide = (None if setting is None else setting.double() for setting in (top_p, min_p))
    want = ops.truncate_logits(logits.double(), top_k, *wide).float()
    got = truncate.truncate_logits(logits.clone(), top_k, top_p, min_p)
    assert torch.equal(got[got > -INF], logits[got > -INF])
    differs = (want != got).sum(dim=-1)
    for row in torch.nonzero(differs).flatten().tolist():
        assert top_p is not None
        assert float(top_p[row]) < 1
        assert int(differs[row]) == 1
        [odd] = logits[row, want[row] != got[row]].tolist()
        both = torch.maximum(want[row], got[row])
        assert odd == both[both > -INF].min()
    # By chance that happens to few.
    assert int((differs > 0).sum()) <= max(len(logits) // 8, 1)


KS, PS, MIN_PS = [0, 1, 2, 20, 33, 200, 2**31 - 1], [1.0, 1e-20, 0.3, 0.9, 0.999], [0.0, 1e-6, 0.1, 1.0]
COMBINATIONS = [(k, p, m) for k in KS for p in PS for m in MIN_PS]
KINDS = ["flat", "peaked", "ties", "masked", "sorted"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in ("flat", "sorted") else []) for kind in KINDS]
)
def test_combinations_keep_what_the_reference_keeps(kind: str) -> None:
    torch.manual_seed(len(kind))
    # Kernels take long in the interpreter: each kind has its share of them.
    combinations = COMBINATIONS[KINDS.index(kind) :: 7]
    n, vocab = len(combinations), 301
    logits = torch.randn(n, vocab)
    if kind == "peaked":
        logits *= 6
    elif kind == "ties":
        logits = (logits * 2).round()
    elif kind == "masked":
        logits[torch.rand(n, vocab) < 0.9] = -INF
        logits[:, 100] = 1.0
    elif kind == "sorted":
        logits = logits.sort(dim=-1, descending=True).values
    k, p, m = zip(*combinations)
    compare(logits.to(DEVICE), column(list(k), torch.int32), column(list(p)), column(list(m)))


@pytest.mark.parametrize("vocab", [1, 5, 16, 300, 8192, 20_011])
def test_sizes_and_blocks_as_they_are(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = (torch.randn(6, vocab) * 3).to(DEVICE)
    top_p = column([1.0, 0.9, 0.99, 1.0, 0.7, 1.0])
    compare(logits, column([50, 0, 7000, 6000, 1, 0], torch.int32), top_p, column([0, 0, 0, 0.01, 0, 0.2]))
    compare(logits, None, None, column([0.5] * 6))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "limit",
    [
        # More candidates than there is room for, though they are enough.
        pytest.param({"ROOM": 32, "AIM": 60}, marks=pytest.mark.slow),
        # Candidates that hold neither k tokens nor p of the mass.
        pytest.param({"AIM": 2}, marks=pytest.mark.slow),
        # All candidates are ranked at once, or after a search among them.
        pytest.param({"ROOM": 512, "FEW": 256}, marks=pytest.mark.slow),
        {"ROOM": 512, "AIM": 90},
        # Groups grow with the row.
        pytest.param({"MOST_GROUPS": 32}, marks=pytest.mark.slow),
    ],
)
def test_limits_change_the_way_but_not_the_end(limit: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"FEW": 32, "BLOCK": 512} | limit).items():
        monkeypatch.setattr(truncate, name, value)
    torch.manual_seed(3)
    settings = [(40, 1.0), (40, 0.9), (0, 0.5), (0, 0.95), (150, 0.9), (3, 0.99), (250, 0.4), (0, 1 - 1e-6)]
    logits = torch.randn(len(settings), 320)
    # Half of them with few different logits, so that equals are in several parts.
    logits[::2] = (logits[::2] * 2).round() / 2
    logits[5, 100:] = -INF
    k, p = zip(*settings)
    args = column(list(k), torch.int32), column(list(p))
    compare(logits.to(DEVICE), *args)
    compare(logits.flip(0).to(DEVICE), *args, column([0.0, 0.0, 0.05, 0.05, 0.1, 0.0, 0.02, 0.3]))


@pytest.mark.usefixtures("small_blocks")
def test_fewer_tokens_than_top_k_all_stay() -> None:
    """Even where all the mass is in those that were looked at."""
    logits = torch.full((2, 400), -INF, device=DEVICE)
    logits[:, ::3] = torch.arange(134, device=DEVICE) * 0.01
    logits[:, 200] = 60.0
    left = truncate.truncate_logits(logits.clone(), column([140, 399], torch.int32), column([1.0, 1.0]), None)
    assert torch.equal(left, logits)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_neither_neighbours_nor_what_is_in_the_buffers_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    logits = torch.randn(12, 300, device=DEVICE) * torch.arange(1, 13, device=DEVICE).sqrt()[:, None]
    logits[1, 5], logits[1, 6] = math.nan, -0.0
    k = column([9, 0, 0, 0, 100, 100, 0, 1, 0, 0, 30, 0], torch.int32)
    p = column([1.0, 1.0, 0.8, 1.0, 1.0, 0.7, 0.99, 1.0, 0.3, 1.0, 0.5, 1.0])
    m = column([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.05, 0.0])

    def bits(rows: slice) -> Tensor:
        return truncate.truncate_logits(logits[rows].clone(), k[rows], p[rows], m[rows]).view(torch.int32)

    together = bits(slice(None))
    for idle in (1, 9, 11):
        assert torch.equal(together[idle], logits[idle].view(torch.int32))
    for alone in (0, 2, 5, 6, 10):
        assert torch.equal(bits(slice(alone, alone + 1))[0], together[alone])
    empty = torch.empty
    for filler in (-1, 77):
        monkeypatch.setattr(torch, "empty", lambda *args, f=filler, **kwargs: empty(*args, **kwargs).fill_(f))
        assert torch.equal(bits(slice(None)), together)


@pytest.mark.usefixtures("small_blocks")
def test_among_equals_the_lower_ids_stay() -> None:
    def kept(logits: Tensor, k: int, p: float) -> list[int]:
        left = truncate.truncate_logits(logits[None].clone(), column([k], torch.int32), column([p]), None)
        return torch.nonzero(left[0] > -INF).flatten().tolist()

    equal = torch.full((200,), -2.0, device=DEVICE)
    assert kept(equal, 100, 1.0) == list(range(100))
    assert kept(equal, 0, 0.25) == list(range(50))
    assert kept(equal, 10, 0.25) == [0, 1, 2]
    assert kept(equal, 199, 1e-30) == [0]
    equal[[7, 150]] = 3.0
    assert kept(equal, 1, 1.0) == [7]
    assert kept(equal, 100, 1.0) == sorted([*range(99), 150])
    assert kept(equal, 4, 1.0) == [0, 1, 7, 150]
    zeros = torch.zeros(100, device=DEVICE)
    zeros[::2] = -0.0
    assert kept(zeros, 3, 1.0) == [0, 1, 2]
    wide = torch.linspace(-1, 1, 200, device=DEVICE) * 1e38
    assert kept(wide, 3, 0.9) == [199]


@pytest.mark.usefixtures("small_blocks")
def test_a_row_that_is_not_finite_or_asks_for_nothing_is_left_alone() -> None:
    logits = torch.randn(5, 200, device=DEVICE)
    logits[0, 77], logits[1, 77], logits[2] = math.nan, INF, -INF
    k, p = column([3, 3, 3, 0, 0], torch.int32), column([0.5, 0.5, 0.5, 1.0, 1.0])
    left = truncate.truncate_logits(logits.clone(), k, p, column([0.1, 0.1, 0.1, 0.0, 0.0]))
    torch.testing.assert_close(left, logits, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _uniform_kernel(seed_ptr, index_ptr, position_ptr, out_ptr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    seed, index, position = tl.load(seed_ptr + row), tl.load(index_ptr + row), tl.load(position_ptr + row)
    low = gumbel_argmax._row_key(tl.full((), gumbel_argmax.LOW_KEY, tl.uint32), seed, index, position)
    high = gumbel_argmax._row_key(tl.full((), gumbel_argmax.HIGH_KEY, tl.uint32), seed, index, position)
    ids = tl.arange(0, SIZE)
    tl.store(out_ptr + row * SIZE + ids, gumbel_argmax._uniform(low, high, ids))


def test_the_noise_has_the_same_bits() -> None:
    seed = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0], device=DEVICE)
    index, position = torch.arange(6, dtype=torch.int32, device=DEVICE), torch.arange(6, device=DEVICE) * 1000
    out = torch.empty(6, 1024, device=DEVICE)
    _uniform_kernel[(6,)](seed, index, position, out, SIZE=1024)
    assert torch.equal(out, noise.uniform(seed, index, position, 1024))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 12])
def test_draws_are_the_references(rows: int, scale: float) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, 700, device=DEVICE) * scale
    logits[:, ::7] = -INF
    logits[rows // 2 :, 500] = logits[rows // 2 :].amax(dim=-1)
    row = torch.arange(rows, device=DEVICE)
    temperature = torch.where(row % 4 == 3, 0.0, 0.1 + row / 8)
    keys = temperature, row * 2**33 - 9, row.int() % 3, row + 7
    *want, score = ops.gumbel_argmax(logits, *keys)
    *got, got_score = gumbel_argmax.gumbel_argmax(logits, *keys)
    for theirs, ours in zip(want, got, strict=True):
        assert theirs.dtype == ours.dtype
        assert torch.equal(theirs, ours)
    torch.testing.assert_close(got_score, score)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_best_of_a_vocabularys_parts_is_the_draw_from_all_of_it(ranks: int) -> None:
    rows, vocab = 9, 701
    torch.manual_seed(ranks)
    logits = torch.randn(rows, vocab, device=DEVICE)
    row = torch.arange(rows, device=DEVICE)
    keys = torch.where(row % 4 == 3, 0.0, 0.7), row * 2**33 - 9, row.int() % 3, row + 7
    logits[3, 11] = logits[3, 600] = 9.0  # a tie over two parts, in a greedy row
    for draw in (ops.gumbel_argmax, gumbel_argmax.gumbel_argmax):
        whole, _, best = draw(logits, *keys)
        starts = range(0, vocab, -(-vocab // ranks))
        parts = [draw(logits[:, start : start + starts.step], *keys, start) for start in starts]
        tokens, _, scores = (torch.stack(one) for one in zip(*parts))
        assert torch.equal(scores.amax(0), best)
        assert torch.equal(torch.where(scores == best, tokens, vocab).amin(0), whole)
        assert whole[3] == 11


@pytest.mark.usefixtures("small_blocks")
def test_a_row_alone_draws_what_it_draws_among_others() -> None:
    torch.manual_seed(0)
    logits, row = torch.randn(9, 300, device=DEVICE), torch.arange(9, device=DEVICE)
    keys = torch.ones(9, device=DEVICE), row, row, row
    together, *_ = gumbel_argmax.gumbel_argmax(logits, *keys)
    for i in (0, 8):
        alone, *_ = gumbel_argmax.gumbel_argmax(logits[i : i + 1], *(key[i : i + 1] for key in keys))
        assert alone[0] == together[i]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "features", [SamplingFeatures(random=True, truncated=t, min_p=m) for t in (0, 1) for m in (0, 1)]
)
def test_sample_gives_the_same_tokens_with_either(features: SamplingFeatures) -> None:
    torch.manual_seed(1)
    n = 9
    logits = torch.randn(n, 300, device=DEVICE) * 3
    logits[3, 3], logits[4, 4], logits[5] = math.nan, INF, -INF
    state = RowSettings.neutral(n + 1, torch.device(DEVICE))
    state.temperature[:] = torch.arange(n + 1) % 3 / 2
    state.seed[:] = torch.arange(n + 1) * 2**31
    state.top_k[::2] = 20
    state.top_p[::5] = 0.8
    state.min_p[::4] = 0.05
    rows = torch.arange(n, 0, -1, device=DEVICE)
    args = logits, state.gather_rows(rows), rows + 3, features
    (want, want_failed), (got, failed) = sample_logits(*args), sample_logits(*args, TRITON)
    assert torch.equal(got, want)
    assert torch.equal(failed, want_failed)
    assert failed.sum() == 3
