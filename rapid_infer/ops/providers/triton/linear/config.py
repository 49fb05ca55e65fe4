"""How a product of few tokens is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

PARTIALS = 1 << 22
"""fp32 numbers of the workspace that splits leave their sums in: 16 MiB."""
SEMAPHORES = 1 << 14


@dataclass(frozen=True)
class Config:
    """block_n outputs and, at a time, block_k inputs of a program; `splits` programs share the inputs of a block.

    gemv: plain arithmetic, one token; else tensor cores. weight_first: the weight is the left operand. `ahead`: what is
    fetched of each weight row before the kernel ahead has ended: lines of 128 bytes into L2, a power of two; for gemv,
    the first tile (1) or nothing (0).
    """

    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = 1
    gemv: bool = False
    weight_first: bool = False
    tma: bool = False
    ahead: int = 0

    def fits(self, m: int, n: int, gated: bool = False) -> bool:
        """Whether the workspace holds the partial sums of `[m, n]` outputs."""
        return self.splits == 1 or (
            self.splits * m * n * (1 + gated) <= PARTIALS and -(-n // self.block_n) <= SEMAPHORES
        )


def padded_rows(m: int) -> int:
    """Tokens that tensor cores compute for m: the classes that configurations are tuned for."""
    return 16 if m <= 16 else 32 if m <= 32 else 64
