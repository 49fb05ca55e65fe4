"""Names for block contents: a hash chain over parent, tokens and extra keys.

blake2b is as fast as Python's tuple hash plus its conversion, and two prompts that collide cannot be made, so a hit
needs no comparison of tokens and one user cannot read another's cache by a crafted prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def root(block_size: int, extra: bytes = b"") -> bytes:
    """Start of a chain. `extra` keeps apart what must not be shared: an adapter, an image digest, a salt."""
    return blake2b(block_size.to_bytes(4, "little") + extra, digest_size=16).digest()


def extend(chain: list[bytes], parent: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append the hashes of all full blocks of `tokens`; `parent` is the hash of what stands before them."""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = array("i", tokens[start : start + block_size]).tobytes()
        parent = blake2b(parent + block, digest_size=16).digest()
        chain.append(parent)
