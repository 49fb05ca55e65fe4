"""Names for block contents: a hash chain over parent, tokens and extra keys.

Two prompts that collide in blake2b cannot be made, so a hit needs no comparison of tokens and one user cannot read
another's cache by a crafted prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class HashExtra:
    """Tokens `start .. stop` stand for what their ids do not tell: the same placeholders for any image, say.

    `digest` names it, its place among the tokens left out.
    """

    start: int
    stop: int
    digest: bytes


def root(block_size: int, cache_salt: bytes = b"") -> bytes:
    """Start of a chain. `cache_salt` keeps apart whole sequences that must not share."""
    return blake2b(block_size.to_bytes(4, "little") + cache_salt, digest_size=16).digest()


def extend(
    chain: list[bytes],
    parent: bytes,
    tokens: ArrayLike,
    block_size: int,
    extras: Sequence[HashExtra] = (),
    first: int = 0,
) -> None:
    """Append the hashes of all full blocks of `tokens`; `parent` is the hash of what stands before them.

    `extras` are in order; `first`: the position of the first token, in their counting.
    """
    content = np.asarray(tokens, np.int32).tobytes()
    size = 4 * block_size
    for start in range(0, len(content) - size + 1, size):
        key = content[start : start + size]
        if extras:
            key += _keys(extras, first + start // 4, block_size)
        parent = blake2b(parent + key, digest_size=16).digest()
        chain.append(parent)


def _keys(extras: Sequence[HashExtra], start: int, block_size: int) -> bytes:
    """What the extras say of one block; nothing for a block that none of them touches."""
    inside = (extra for extra in extras if extra.start < start + block_size and extra.stop > start)
    # All parts have a known length, so that no two lists give the same bytes.
    parts = ((extra.start - start, extra.stop - start, len(extra.digest), extra.digest) for extra in inside)
    return b"".join(np.array(numbers, np.int64).tobytes() + digest for *numbers, digest in parts)


def first_difference(extras: Sequence[HashExtra], others: Sequence[HashExtra]) -> int | None:
    """The first position of which the two say different things; None when there is none."""
    for mine, other in zip(extras, others):
        if mine != other:
            return min(mine.start, other.start)
    rest = [*extras[len(others) :], *others[len(extras) :]]
    return rest[0].start if rest else None
