"""Masks as bits: what is packed comes back, for vocabularies that are no multiple of a word."""

import random

import numpy as np
import pytest
import torch

from rapid_infer.engine.masks import AllowedTokens, pack
from rapid_infer.errors import RequestError
from rapid_infer.worker.token_state import unpack


@pytest.mark.parametrize("vocab", [1, 7, 31, 32, 33, 63, 64, 65, 199, 1000])
def test_packed_ids_come_back(vocab: int) -> None:
    rng = random.Random(vocab)
    for ids in ([0], [vocab - 1], list(range(vocab)), rng.sample(range(vocab), rng.randint(1, vocab))):
        bits = pack(ids, vocab)
        assert (bits.shape, bits.dtype) == ((-(-vocab // 32),), np.int32)
        for token in range(vocab):
            assert bool(int(bits[token // 32]) >> (token % 32) & 1) == (token in ids)
        allowed = unpack(torch.from_numpy(bits)[None], vocab)
        assert allowed.shape == (1, vocab)
        assert torch.nonzero(allowed[0]).flatten().tolist() == sorted(set(ids))


def test_rows_are_unpacked_apart() -> None:
    bits = np.stack([pack([1, 40], 45), pack([44], 45)])
    allowed = unpack(torch.from_numpy(bits), 45)
    assert [torch.nonzero(row).flatten().tolist() for row in allowed] == [[1, 40], [44]]


def test_all_bits_set_forbids_nothing() -> None:
    assert bool(unpack(torch.full((2, 3), -1, dtype=torch.int32), 70).all())


@pytest.mark.parametrize("token", [10, 31, -1, 2**31])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(RequestError, match=rf"token id {token} is outside the vocabulary: expected 0 to 9"):
        pack([3, token], 10)


def test_allowed_tokens_ask_for_no_waiting_and_never_change() -> None:
    mask = AllowedTokens([3, 3, 5], 10)
    assert mask.changes is False
    assert np.array_equal(mask.bits([]), mask.bits([3, 5]))
    assert np.array_equal(mask.bits([]), pack([3, 5], 10))
