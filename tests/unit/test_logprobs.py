"""Log-probabilities against log_softmax: values, ranks, order."""

import pytest
import torch

from rapid_infer.worker.logprobs import concatenate, gather_logprobs


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_values_ids_and_ranks_are_those_of_log_softmax(count: int) -> None:
    torch.manual_seed(count)
    logits = torch.randn(40, 57) * 5 + 100
    chosen = torch.randint(57, (40,))
    found = gather_logprobs(logits, chosen, count)
    wanted = logits.double().log_softmax(-1)
    assert found.ids.shape == found.values.shape == (40, 1 + count)
    assert torch.equal(found.ids[:, 0], chosen)
    torch.testing.assert_close(found.values.double(), wanted.gather(1, found.ids), atol=1e-4, rtol=0)
    order = wanted.argsort(descending=True, dim=-1)
    assert torch.equal(found.ids[:, 1:], order[:, :count])
    assert found.rank.tolist() == [int((order[i] == chosen[i]).nonzero()) + 1 for i in range(40)]


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    found = gather_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), 20)
    assert found.ids.tolist() == [[0, 1, 2, 0]]
    assert found.rank.tolist() == [3]


def test_equal_logits_share_the_better_rank() -> None:
    found = gather_logprobs(torch.tensor([[1.0, 1.0, 0.0, 1.0]]), torch.tensor([3]), 0)
    assert found.rank.tolist() == [1]


def test_minus_infinity_has_no_probability_and_spoils_nothing() -> None:
    found = gather_logprobs(torch.tensor([[0.0, -torch.inf, 0.0]]), torch.tensor([1]), 2)
    assert found.values[0, 0] == -torch.inf
    torch.testing.assert_close(found.values[0, 1:], torch.full((2,), 0.5).log())
    assert found.rank.tolist() == [3]


def test_pieces_add_up() -> None:
    torch.manual_seed(0)
    logits, chosen = torch.randn(10, 9), torch.randint(9, (10,))
    whole = gather_logprobs(logits, chosen, 3)
    pieces = concatenate([gather_logprobs(a, b, 3) for a, b in zip(logits.split(4), chosen.split(4))])
    for one, other in zip(whole, pieces):
        torch.testing.assert_close(one, other)
