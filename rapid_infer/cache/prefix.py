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


def extend(chain: list[bytes], start: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to `chain` the hashes of all full blocks of `tokens` that it lacks; `start` is the chain's root."""
    for i in range(len(chain), len(tokens) // block_size):
        parent = chain[-1] if chain else start
        block = array("i", tokens[i * block_size : (i + 1) * block_size]).tobytes()
        chain.append(blake2b(parent + block, digest_size=16).digest())
