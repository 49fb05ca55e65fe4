"""Names for block contents: a hash chain over parent, tokens and extra keys.

Two prompts that collide in blake2b cannot be made, so a hit needs no comparison of tokens and one user cannot read
another's cache by a crafted prompt.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike


def root(block_size: int, extra: bytes = b"") -> bytes:
    """Start of a chain. `extra` keeps apart what must not be shared: an adapter, an image digest, a salt."""
    return blake2b(block_size.to_bytes(4, "little") + extra, digest_size=16).digest()


def extend(chain: list[bytes], parent: bytes, tokens: ArrayLike, block_size: int) -> None:
    """Append the hashes of all full blocks of `tokens`; `parent` is the hash of what stands before them."""
    content = np.asarray(tokens, np.int32).tobytes()
    size = 4 * block_size
    for start in range(0, len(content) - size + 1, size):
        parent = blake2b(parent + content[start : start + size], digest_size=16).digest()
        chain.append(parent)
