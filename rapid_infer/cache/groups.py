"""Which blocks a request holds in one cache group: a policy for each kind of group, without any state of its own.

A request's table in a group is a list of block ids by column: column c is for positions `c * block_size` up to the next
column's. 0 stands where the request holds nothing: block 0 is never handed out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rapid_infer.cache.block_pool import BlockPool


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return math.ceil(tokens / block_size)


@dataclass(frozen=True)
class GroupPolicy:
    """As it stands, that of a paged group: every position is seen by all later ones, and each block is kept to the end.

    Other kinds of groups override what differs. Equal specs have equal policies.
    """

    block_size: int

    max_rollback: ClassVar[int | None] = None
    """How many tokens can be taken back after they were written; None for any number."""

    trims: ClassVar[bool] = False
    """Whether `trim` may ever find something."""

    checkpoints: ClassVar[bool] = False
    """Whether blocks hold what stands for all tokens before, and are named where `keeps` says so."""

    def most(self, tokens: int, max_query: int) -> int:
        """Most blocks a request of `tokens` tokens holds at once, computing at most `max_query` of them in a step."""
        return blocks_for(tokens, self.block_size)

    def need(self, table: Sequence[int], tokens: int, pool: BlockPool) -> int:
        """How many blocks `grow` would take from the pool."""
        return max(-(-tokens // self.block_size) - len(table), 0)

    def grow(self, table: list[int], tokens: int, pool: BlockPool) -> list[int]:
        """Add columns until the table holds `tokens` tokens; returns what it takes out that the step still reads."""
        table += pool.allocate(self.need(table, tokens, pool))
        return []

    def trim(self, table: list[int], computed: int) -> list[int]:
        """Take out, and return, the blocks that no position from `computed` on can see."""
        return []

    def resume(self, hashes: Sequence[bytes], cached: Callable[[bytes], bool]) -> int:
        """The most leading blocks of a prompt with these hashes after which it can go on from what is cached."""
        return next((i for i, digest in enumerate(hashes) if not cached(digest)), len(hashes))

    def seen_from(self, column: int) -> int:
        """The first column that a request needs that goes on at the beginning of `column`."""
        return 0

    def end_of_step(self, start: int, stop: int, prompt: int) -> int:
        """Where a step of positions `start .. stop` of a request should end, after `start`."""
        return stop

    def keeps(self, computed: int, prompt: int) -> bool:
        """Whether the block that stands for `computed` tokens is to be named."""
        return False


@dataclass(frozen=True)
class WindowPolicy(GroupPolicy):
    """A position sees itself and the `window - 1` before it: blocks that all later ones are past go back."""

    window: int
    trims = True

    def most(self, tokens: int, max_query: int) -> int:
        # One more where the window begins inside a block.
        return min(blocks_for(tokens, self.block_size), blocks_for(self.window - 1 + max_query, self.block_size) + 1)

    def trim(self, table: list[int], computed: int) -> list[int]:
        column = min(self._first(computed), len(table))
        removed: list[int] = []
        while column and table[column - 1]:
            column -= 1
            removed.append(table[column])
            table[column] = 0
        return removed[::-1]

    def resume(self, hashes: Sequence[bytes], cached: Callable[[bytes], bool]) -> int:
        n = len(hashes)
        while n:
            missing = (c for c in range(n - 1, self.seen_from(n) - 1, -1) if not cached(hashes[c]))
            column = next(missing, None)
            if column is None:
                break
            # Of shorter prefixes, all that hold this column see it.
            n = column
        return n

    def seen_from(self, column: int) -> int:
        return self._first(column * self.block_size)

    def _first(self, position: int) -> int:
        return max(position - self.window + 1, 0) // self.block_size


@dataclass(frozen=True)
class StatePolicy(GroupPolicy):
    """One block holds all that a recurrent layer keeps of a request: it is read and overwritten by each step.

    A step of positions `start .. stop` reads the block at the column of `start - 1`, unless it starts at 0, and writes
    the one at the column of `stop - 1`. As long as nobody else names the block, it moves on from column to column. A
    step that ends with a block's last token leaves a state that can be named, a checkpoint: the next one then writes
    another block. One is made after every `every`-th block of tokens, where steps happen to end there, and at the last
    block boundary before a prompt's end, where they are made to.
    """

    every: int = 1
    max_rollback = 0
    checkpoints = True

    def most(self, tokens: int, max_query: int) -> int:
        # The one that is written, and a checkpoint that is read for the last time.
        return 2

    def need(self, table: Sequence[int], tokens: int, pool: BlockPool) -> int:
        if -(-tokens // self.block_size) <= len(table):
            return 0
        return 0 if table and pool.is_private(table[-1]) else 1

    def grow(self, table: list[int], tokens: int, pool: BlockPool) -> list[int]:
        columns = -(-tokens // self.block_size)
        if columns <= len(table):
            return []
        fresh = pool.allocate(self.need(table, tokens, pool))
        left = [table[-1]] if table else []
        if left:
            table[-1] = 0
        table += [0] * (columns - len(table) - 1)
        table += fresh or left
        return left if fresh else []

    def resume(self, hashes: Sequence[bytes], cached: Callable[[bytes], bool]) -> int:
        return next((n for n in range(len(hashes), 0, -1) if cached(hashes[n - 1])), 0)

    def seen_from(self, column: int) -> int:
        return max(column - 1, 0)

    def end_of_step(self, start: int, stop: int, prompt: int) -> int:
        last = (prompt - 1) // self.block_size * self.block_size
        return last if start < last < stop else stop

    def keeps(self, computed: int, prompt: int) -> bool:
        columns, inside = divmod(computed, self.block_size)
        return not inside and columns > 0 and (columns % self.every == 0 or columns == (prompt - 1) // self.block_size)
