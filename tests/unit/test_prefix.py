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


def named(*extras: prefix.HashExtra) -> list[bytes]:
    hashes: list[bytes] = []
    prefix.extend(hashes, prefix.root(4), TOKENS, 4, extras)
    return hashes


def test_an_extra_changes_the_blocks_that_it_touches_and_those_after_them() -> None:
    image = prefix.HashExtra(5, 9, b"image")
    assert named(image)[0] == chain(TOKENS)[0]
    others = [
        chain(TOKENS),
        named(prefix.HashExtra(5, 9, b"other")),
        named(prefix.HashExtra(4, 9, b"image")),
        named(prefix.HashExtra(5, 10, b"image")),
        named(prefix.HashExtra(5, 8, b"image"), prefix.HashExtra(8, 9, b"image")),
    ]
    for other in others:
        assert not set(other[1:]) & set(named(image)[1:])
    # A chain made in pieces, as a request's is while it grows.
    pieces = named(image)[:1]
    prefix.extend(pieces, pieces[0], TOKENS[4:], 4, (image,), first=4)
    assert pieces == named(image)


def test_the_first_difference_of_two_lists_of_extras() -> None:
    one, two, other = prefix.HashExtra(2, 4, b"1"), prefix.HashExtra(6, 9, b"2"), prefix.HashExtra(5, 9, b"2")
    assert prefix.first_difference((one, two), (one, two)) is None
    assert prefix.first_difference((), ()) is None
    assert prefix.first_difference((one, two), (one, other)) == 5
    assert prefix.first_difference((one,), (one, two)) == prefix.first_difference((one, two), (one,)) == 6
