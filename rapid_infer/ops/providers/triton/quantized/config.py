"""How a quantized product of few tokens is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from rapid_infer.ops.providers.triton.linear.config import PARTIALS, SEMAPHORES


@dataclass(frozen=True)
class Config:
    """block_n outputs and, at a time, 64 `lines` bytes of each row of the matrix; otherwise as `linear.config.Config`.

    A warp has 16 rows of the matrix, or several times as many; a gated product has two rows for an output. gather: x is
    read in the order in which it is multiplied, by small loads, rather than brought in it. inner: scales are multiplied
    into values, rounded to 16 bits, also where they could be multiplied with sums.
    """

    block_n: int
    lines: int
    splits: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 4
    gather: bool = False
    inner: bool = False

    def fits(self, m: int, n: int, gated: bool = False) -> bool:
        """Whether the workspace holds the partial sums of `[m, n]` outputs, and warps divide the rows."""
        if self.block_n * (1 + gated) % (16 * self.warps):
            return False
        programs = -(-n // self.block_n) * -(-m // padded_rows(m))
        return self.splits == 1 or (self.splits * m * n * (1 + gated) <= PARTIALS and programs <= SEMAPHORES)


def padded_rows(m: int) -> int:
    """Tokens of a program for m in all."""
    return next((rows for rows in (16, 32, 64) if m <= rows), 128)
