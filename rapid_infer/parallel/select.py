"""Which provider of collectives the ranks use: the first one that works on all of them, by a test with real data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from rapid_infer.errors import ConfigError
from rapid_infer.parallel.comm import Comm, ordered_sum
from rapid_infer.parallel.process_group import agree

logger = logging.getLogger(__name__)


def self_test(comm: Comm, rank: int, size: int, device: torch.device) -> str | None:
    """Why `comm` is not to be used; None when it adds and gathers as it should.

    To the end in any case: the other ranks wait for this one.
    """
    reasons = []
    # On GPUs also what is larger than a provider's own calls, so that what it gives that to is tried, too.
    for columns in (10_000, 200_000) if device.type == "cuda" else (10_000,):
        for dtype in (torch.float32, torch.bfloat16):
            # Sums that 16 bits hold exactly, in whatever order and precision they are made.
            count = torch.arange(7 * columns, device=device).view(7, -1)
            every = [((count + r) % 5).to(dtype) for r in range(size)]
            mine = every[rank]
            of = f"{mine.nbytes} bytes of {dtype}"
            gathered = comm.all_gather(mine)
            if not all(torch.equal(a, b) for a, b in zip(gathered, every, strict=True)):
                reasons.append(f"it does not gather {of} as it should")
            if not torch.equal(comm.all_reduce(mine.clone()), ordered_sum(every, dtype)):
                reasons.append(f"it does not add {of} as it should")
    return "; ".join(reasons) or None


def select_comm(candidates: Mapping[str, Callable[[], Comm]], rank: int, size: int, device: torch.device) -> Comm:
    """The first candidate that every rank can use. ConfigError when there is none.

    One that is dropped is dropped by all ranks together, and each that has a reason logs it.
    """
    for name, make in candidates.items():
        comm: Comm | None = None
        try:
            comm = make()
            reason = self_test(comm, rank, size, device) if agree(True) else None
        except Exception as error:
            if comm is None:
                agree(False)
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            logger.warning("rank %d cannot use collectives over %s: %s", rank, name, reason)
        if agree(comm is not None and reason is None) and comm is not None:
            return comm
    raise ConfigError(f"no collectives work on all {size} ranks; tried {', '.join(candidates)}")
