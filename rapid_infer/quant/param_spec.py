"""How a parameter of a weight format lies over the features of a matrix; each rank's shape and cut follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Noise = Callable[[tuple[int, ...]], Tensor]
"""Standard normal values fp32 of a shape."""


@dataclass(frozen=True)
class Dim:
    """One dimension of a parameter: an entry for every `group` "output" or "input" features of a matrix.

    Groups are counted from the start of each part of a merged matrix, as in the checkpoint, and the last may have fewer
    features; `group` None is one group of all. An entry is a fact about its group (a scale, a zero point): where a cut
    runs through the group, the ranks on both sides keep it. `packed` says that it holds the values themselves instead
    (eight 4-bit values in an int32): such a cut is refused. `whole`: every rank keeps all entries, whatever is cut.

    "part" is one entry for each part of a merged matrix, of which the checkpoint has a tensor without this dimension.
    "value" is `group` entries that always stay together (16 bytes of a block).
    """

    over: Literal["output", "input", "part", "value"]
    group: int | None = 1
    packed: bool = False
    whole: bool = False

    def entry(self, feature: int, size: int) -> int:
        """The entry of feature number `feature` among the `size` of a part."""
        return feature // (self.group or max(size, 1))

    def count(self, size: int) -> int:
        """How many entries `size` features have."""
        return self.entry(size - 1, size) + 1 if size else 0


OUT, IN, PART = Dim("output"), Dim("input"), Dim("part")


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a matrix `[out, in]`: its type and what each of its dimensions runs over.

    | `dims` | for example |
    |---|---|
    | `(OUT, IN)` | the weight itself |
    | `(PART,)` | one scale for each of q, k and v, which the files hold as `[]` or `[1]` |
    | `(OUT, Dim("input", None))` | a scale for each row, `[out, 1]` |
    | `(Dim("output", 128), Dim("input", 128))` | a scale for each block of 128 x 128 |
    | `(Dim("input", 8, packed=True), OUT)` | eight 4-bit values along the input in an int32 (GPTQ) |
    | `(PART, IN)` | which group an input feature belongs to, which may differ from part to part |
    | `(Dim("input", 128, whole=True), OUT)` | group scales of rows in any order: a rank's share needs all of them |

    `check` is asked about values of the checkpoint, as they are stored, and gives what is wrong with them, or None.
    `dummy(noise, shape)` makes values for load_format="dummy" out of normal noise, of which `noise(shape)` gives more;
    by default it is noise of deviation 0.02, or random bits.
    """

    dtype: torch.dtype
    dims: tuple[Dim, ...] = (OUT, IN)
    check: Callable[[Tensor], str | None] | None = None
    dummy: Callable[[Noise, tuple[int, ...]], Tensor] | None = None
