"""The hash chain: what must give the same name, and what must not."""

import pytest

from rapid_infer.cache import prefix

TOKENS = list(range(10, 22))


def chain(tokens: list[int], size: int = 4, extra: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    prefix.extend(hashes, prefix.root(size, extra), tokens, size)
    return hashes


def test_one_hash_for_each_full_block() -> None:
    assert [len(chain(TOKENS[:n])) for n in (0, 3, 4, 7, 8, 12)] == [0, 0, 1, 1, 2, 3]
    assert len(set(chain([5] * 12))) == 3, "equal tokens at other positions are other content"


def test_equal_tokens_have_equal_hashes() -> None:
    assert chain(TOKENS) == chain(list(TOKENS))
    assert chain(TOKENS)[:2] == chain(TOKENS[:8])


@pytest.mark.parametrize("position", range(12))
def test_a_changed_token_changes_its_block_and_all_after_it(position: int) -> None:
    changed = list(TOKENS)
    changed[position] += 1
    same = [a == b for a, b in zip(chain(TOKENS), chain(changed))]
    assert same == [block < position // 4 for block in range(3)]


def test_extra_keys_and_block_size_keep_chains_apart() -> None:
    others = [chain(TOKENS, extra=b"adapter"), chain(TOKENS, extra=b"adapter2"), chain(TOKENS, size=2)]
    all_hashes = [h for hashes in (chain(TOKENS), *others) for h in hashes]
    assert len(set(all_hashes)) == len(all_hashes)
    assert prefix.root(4) != prefix.root(8)


def test_a_chain_grows_from_its_last_hash() -> None:
    hashes = chain(TOKENS[:8])
    prefix.extend(hashes, hashes[-1], TOKENS[8:], 4)
    assert hashes == chain(TOKENS)


def test_token_ids_beyond_16_bits_are_told_apart() -> None:
    assert chain([1 << 16, 0, 0, 0]) != chain([0, 0, 0, 0])
