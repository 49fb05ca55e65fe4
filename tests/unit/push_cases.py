"""Ranks of one process that exchange by `parallel.push`, what they put in, and what must come out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from rapid_infer.parallel import push
from rapid_infer.parallel.push import PushBuffers

WORDS = {2: torch.int16, 4: torch.int32}
EPS = 1e-5


@triton.jit
def _round_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < size)


def fp32_sum(xs: list[Tensor]) -> Tensor:
    """In rank order, rounded once to the dtype, as the device that runs the kernels rounds."""
    total = torch.zeros(xs[0].shape, dtype=torch.float32, device=xs[0].device)
    for x in xs:
        total += x.float()
    if total.is_cuda:
        return total.to(xs[0].dtype)
    out = torch.empty_like(xs[0])
    _round_kernel[(triton.cdiv(out.numel(), 256),)](total, out, out.numel(), BLOCK=256)
    return out


def bits(x: Tensor) -> Tensor:
    return x.view(WORDS[x.itemsize])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def same_values(a: Tensor, b: Tensor) -> bool:
    """The same bits, but for the sign of zeros and what a NaN carries."""
    return torch.equal(a.isnan(), b.isnan()) and same_bits(
        torch.where((a == 0) | a.isnan(), 0, a), torch.where((b == 0) | b.isnan(), 0, b)
    )


def mixed(rows: int, size: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    """Numbers of all magnitudes among zeros of both signs, subnormals of both signs, infinities and NaNs."""
    info = torch.finfo(dtype)
    special = torch.tensor(
        [0.0, 0.0, 0.0, -0.0, -0.0, float("inf"), float("-inf"), float("nan"), info.max, info.tiny], dtype=dtype
    )
    # By their bits: arithmetic might flush them.
    least = torch.tensor([1, 3, -(1 << (8 * dtype.itemsize - 1)) + 1], dtype=WORDS[dtype.itemsize]).view(dtype)
    special = torch.cat([special, least])
    x = torch.randn(rows, size, generator=generator) * 2.0 ** torch.randint(-12, 12, (rows, size), generator=generator)
    drawn = special[torch.randint(len(special), (rows, size), generator=generator)]
    chosen = torch.rand(rows, size, generator=generator) < 0.5
    return torch.where(chosen, drawn, x.to(dtype)).to(device)


def staged(ranks: list[PushBuffers], run: Callable[[int, tuple[str, ...]], object]) -> None:
    """Each stage on all ranks before the next: `run(rank, stages)`."""
    for stage in push.STAGES:
        for rank in range(len(ranks)):
            run(rank, (stage,))


def all_reduce(ranks: list[PushBuffers], xs: list[Tensor]) -> list[Tensor]:
    outs = [torch.empty_like(x) for x in xs]
    staged(ranks, lambda rank, stages: push.push_all_reduce(ranks[rank], xs[rank], outs[rank], stages))
    return outs


def all_reduce_norm(
    ranks: list[PushBuffers],
    xs: list[Tensor],
    residuals: list[Tensor],
    weight: Tensor,
    outs: list[Tensor],
    added: list[Tensor],
) -> None:
    """Fused; into outs and added."""

    def run(rank: int, stages: tuple[str, ...]) -> None:
        push.push_all_reduce_add_rms_norm(
            ranks[rank], xs[rank], residuals[rank], weight, EPS, outs[rank], added[rank], stages
        )

    staged(ranks, run)


def at_rest(ranks: list[PushBuffers]) -> bool:
    """All slots hold +0 bits, the ranks are in one epoch, and nothing was waited for in vain."""
    clean = not any(b.memory.any() for b in ranks) and not any(b.error.any() for b in ranks)
    counters = {int(b.state[0]) for b in ranks}
    return clean and len(counters) == 1 and counters.pop() % (1 << 16) == 0


@dataclass
class Call:
    """One call as all ranks make it: `kind` "sum", "two_shot" or "norm"; x by rank, the rest equal on all."""

    kind: str
    xs: list[Tensor]
    residual: Tensor
    weight: Tensor
    outs: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outs = [torch.empty_like(x) for x in self.xs]
        self.residuals = [torch.empty_like(x) for x in self.xs]

    @classmethod
    def drawn(cls, kinds: tuple[str, ...], world_size: int, rows: list[int], size: int, seed: int, device: str) -> Call:
        """The same for equal arguments."""
        generator = torch.Generator().manual_seed(seed)
        draw = random.Random(seed)
        kind, n = draw.choice(kinds), draw.choice(rows)
        x, residual, weight = (
            [torch.randn(k, size, generator=generator).to(device) for _ in range(count)]
            for k, count in ((n, world_size), (n, 1), (1, 1))
        )
        return cls(kind, x, residual[0], weight[0][0])

    def run(self, ranks: list[PushBuffers], rank: int, stages: tuple[str, ...] = push.STAGES) -> None:
        x, out, buffers = self.xs[rank], self.outs[rank], ranks[rank]
        if self.kind == "norm":
            push.push_all_reduce_add_rms_norm(
                buffers, x, self.residual, self.weight, EPS, out, self.residuals[rank], stages
            )
            return
        limit = buffers.one_shot_bytes
        buffers.one_shot_bytes = 0 if self.kind == "two_shot" else limit
        push.push_all_reduce(buffers, x, out, stages)
        buffers.one_shot_bytes = limit

    def correct(self, rank: int) -> bool:
        total = fp32_sum(self.xs)
        if self.kind != "norm":
            return same_values(self.outs[rank], total)
        residual = total + self.residual
        normed = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + EPS) * self.weight
        return same_values(self.residuals[rank], residual) and torch.allclose(self.outs[rank], normed, atol=1e-5)
