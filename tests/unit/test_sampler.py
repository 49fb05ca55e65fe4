"""Noise that depends only on its key, and what sampling settings leave of a distribution."""

import math

import pytest
import torch
from torch import Tensor

from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.ops import truncate_logits
from rapid_infer.ops.noise import gumbel, uniform
from rapid_infer.worker.row_settings import RowSettings
from rapid_infer.worker.sample import sample_logits

RANDOM = SamplingFeatures(random=True)
TRUNCATED = SamplingFeatures(random=True, truncated=True)


def key(n: int, seed: int = 1, sample_index: int = 0, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of n rows at positions first, first + 1, ..."""
    return torch.full((n,), seed), torch.full((n,), sample_index, dtype=torch.int32), torch.arange(first, first + n)


def state(n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 1) -> RowSettings:
    made = RowSettings.neutral(n, torch.device("cpu"))
    made.temperature.fill_(temperature)
    made.top_k.fill_(top_k)
    made.top_p.fill_(top_p)
    made.seed.fill_(seed)
    return made


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """How many standard deviations the statistic lies above its mean."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(observed) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


def test_the_same_key_gives_the_same_noise() -> None:
    assert torch.equal(uniform(*key(4), 100), uniform(*key(4), 100))


def test_noise_depends_on_neither_neighbours_nor_the_size_of_the_batch_or_vocabulary() -> None:
    seed, index, position = torch.tensor([5, -7, 2**62]), torch.tensor([0, 1, 2]), torch.tensor([9, 8, 7])
    together = uniform(seed, index, position, 100)
    for i in range(3):
        assert torch.equal(uniform(seed[i : i + 1], index[i : i + 1], position[i : i + 1], 60)[0], together[i, :60])


def test_every_part_of_the_key_matters() -> None:
    def one(seed: int = 1, index: int = 0, position: int = 0, purpose: int = 0) -> Tensor:
        return uniform(torch.tensor([seed]), torch.tensor([index]), torch.tensor([position]), 1000, purpose)  # type: ignore[arg-type]

    draws = [one(), one(seed=2), one(seed=1 + 2**32), one(seed=-1), one(index=1), one(position=1), one(purpose=1)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert float((a == b).float().mean()) < 0.01
            assert abs(float(torch.corrcoef(torch.cat((a, b)))[0, 1])) < 0.15


def test_noise_is_uniform_over_the_vocabulary_and_over_positions() -> None:
    over_vocabulary = uniform(*key(4), 100_000).flatten()
    over_positions = uniform(*key(100_000), 4).T.flatten()
    for values in (over_vocabulary, over_positions):
        observed = torch.histc(values, bins=64, min=0, max=1)
        assert abs(chi_square(observed, torch.full((64,), len(values) / 64))) < 5


def test_neighbouring_keys_and_ids_are_uncorrelated() -> None:
    values = uniform(*key(2000), 50)
    for a, b in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 0.02


def test_the_interval_is_open_so_that_gumbel_noise_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    values = uniform(*key(100), 20_000)
    assert float(values.min()) > 0
    assert float(values.max()) < 1
    for bits in (0, 0xFFFFFFFF):
        monkeypatch.setattr("rapid_infer.ops.noise._mix", lambda x, bits=bits: torch.full_like(x, bits))
        extreme = uniform(*key(1), 3)
        assert bool(((extreme > 0) & (extreme < 1)).all())
        assert bool(gumbel(*key(1), 3).isfinite().all())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits, n = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]), 20_000
    tokens, failed = sample_logits(logits.expand(n, -1), state(n, temperature), torch.arange(n), RANDOM)
    assert not failed.any()
    observed = torch.bincount(tokens, minlength=5).float()
    assert abs(chi_square(observed, n * torch.softmax(logits / temperature, -1))) < 5


def test_greedy_rows_are_exact_beside_sampled_ones() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 50)
    logits[0, [3, 7]] = 9.0
    mixed = state(64, temperature=1.5, top_k=3)
    mixed.temperature[::2] = 0
    tokens, _ = sample_logits(logits, mixed, torch.arange(64), TRUNCATED)
    assert torch.equal(tokens[::2], logits.argmax(-1)[::2])
    assert tokens[0] == 3
    assert not torch.equal(tokens[1::2], logits.argmax(-1)[1::2])
    plain, _ = sample_logits(logits, state(64, temperature=0), torch.arange(64), SamplingFeatures())
    assert torch.equal(plain, logits.argmax(-1))


def test_logits_of_greedy_rows_are_not_rescaled_beside_sampled_ones() -> None:
    """Any factor but 1 makes some neighbouring numbers one, or infinite."""
    torch.manual_seed(0)
    best = torch.cat((1 + torch.rand(60), torch.full((4,), 3e38)))
    logits = torch.stack((best.nextafter(torch.zeros(())), best), dim=1)
    mixed = state(64, temperature=0.7, top_k=2, top_p=0.9)
    mixed.temperature[1:] = 0
    tokens, failed = sample_logits(logits, mixed, torch.arange(64), TRUNCATED)
    assert not failed.any()
    assert (tokens[1:] == 1).all()


def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits, position = torch.randn(8, 50), torch.arange(8)
    together, _ = sample_logits(logits, state(8, top_k=5, top_p=0.8), position, TRUNCATED)
    for i in range(8):
        alone, _ = sample_logits(logits[i : i + 1], state(1, top_k=5, top_p=0.8), position[i : i + 1], TRUNCATED)
        assert alone[0] == together[i]


def test_settings_of_one_row_do_not_reach_another() -> None:
    logits, n = torch.tensor([3.0, 2.0, 1.0, 0.0]).repeat(4000, 1), 4000
    mixed = state(n)
    mixed.top_k[: n // 2] = 1
    tokens, _ = sample_logits(logits, mixed, torch.arange(n), TRUNCATED)
    assert set(tokens[: n // 2].tolist()) == {0}
    assert set(tokens[n // 2 :].tolist()) == {0, 1, 2, 3}


def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0) -> list[int]:
    k, p = torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p])
    left = truncate_logits(torch.tensor([logits]), k, p, None)
    return torch.nonzero(left[0] > -math.inf).flatten().tolist()


def test_top_k_keeps_the_best_with_ties_by_the_lower_id() -> None:
    assert kept([1.0, 3.0, 2.0, 3.0], top_k=1) == [1]
    assert kept([1.0, 3.0, 2.0, 3.0], top_k=2) == [1, 3]
    assert kept([2.0, 2.0, 2.0, 2.0], top_k=2) == [0, 1]
    assert kept([2.0] * 5000, top_k=100) == list(range(100))
    assert kept([1.0, 3.0, 2.0], top_k=9) == [0, 1, 2]
    assert kept([1.0, 3.0, 2.0], top_k=0) == [0, 1, 2]


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_at_least_one() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert [kept(logits, top_p=p) for p in (1e-6, 0.49, 0.51, 0.79, 0.81, 0.96, 1.0)] == [
        [0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3],
    ]  # fmt: skip
    assert kept([2.0, 2.0, 2.0, 2.0], top_p=0.3) == [0, 1]
    # Above zero, but not in fp32.
    assert kept(logits, top_p=1e-50) == [0]


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of the two that top_k leaves, the first has 0.57 of the probability.
    assert kept(logits, top_k=2, top_p=0.55) == [0]
    assert kept(logits, top_p=0.55) == [0, 1]


def test_truncation_leaves_the_kept_logits_as_they_are() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    left = truncate_logits(logits, torch.tensor([2], dtype=torch.int32), torch.tensor([1.0]), None)
    assert left.tolist() == [[-math.inf, 3.0, 2.0]]


@pytest.mark.parametrize("features", [SamplingFeatures(), RANDOM, TRUNCATED])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone_with_a_token_that_can_be_looked_up(
    bad: float, features: SamplingFeatures
) -> None:
    logits = torch.zeros(4, 6)
    logits[:, 4] = 50.0
    logits[1, 2] = bad
    logits[2] = -math.inf
    tokens, failed = sample_logits(logits, state(4, top_k=3, top_p=0.9), torch.arange(4), features)
    assert failed.tolist() == [False, True, True, False]
    assert tokens.tolist() == [4, 0, 0, 4]


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.99}])
def test_minus_infinity_is_a_token_that_cannot_be_drawn(settings: dict[str, float]) -> None:
    logits = torch.full((2000, 8), -math.inf)
    logits[:, 5] = 0.0
    logits[:, 6] = -1.0
    tokens, failed = sample_logits(logits, state(2000, **settings), torch.arange(2000), TRUNCATED)  # type: ignore[arg-type]
    assert not failed.any()
    assert set(tokens.tolist()) <= {5, 6}


def test_a_tiny_temperature_does_not_overflow() -> None:
    logits = torch.tensor([[1.0, 30.0, -1e4]])
    tokens, failed = sample_logits(logits, state(1, temperature=1e-5), torch.arange(1), RANDOM)
    assert (tokens.tolist(), failed.tolist()) == ([1], [False])
