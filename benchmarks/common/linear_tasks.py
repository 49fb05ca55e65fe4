"""The products that are tuned, and the configurations that are tried for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rapid_infer.ops.providers.triton.linear.choice import choose
from rapid_infer.ops.providers.triton.linear.config import Config, padded_rows
from rapid_infer.ops.providers.triton.quantized import choice as quantized
from rapid_infer.ops.quantized import QuantizedMatrix


@dataclass(frozen=True)
class Task:
    """One product. op: linear; gated (weight `[2 n, k]`, with SiLU); logits (fp32 out); argmax. format: of FORMATS."""

    name: str
    n: int
    k: int
    op: str = "linear"
    format: str = "bf16"

    @property
    def form(self) -> tuple[str, int] | None:
        """Form and group of a quantized matrix, see `ops.quantized`; group 0: a scale for a row."""
        return FORMATS[self.format]

    @property
    def gated(self) -> bool:
        return self.op == "gated"

    @property
    def rows(self) -> int:
        return self.n * (1 + self.gated)


FORMATS = {
    "bf16": None, "fp8_row": ("fp8", 0), "fp8_block": ("fp8", 128), "int4": ("int4", 128), "mxfp4": ("fp4", 32),
    "nvfp4": ("fp4", 16),
}  # fmt: skip
"""What `--format` may name."""


def operands(task: Task, copies: int) -> list[Tensor | QuantizedMatrix]:
    """Different random matrices whose values have deviation of about `1 / sqrt(k)`."""
    if task.form is None:
        weight = torch.randn(copies, task.rows, task.k, dtype=torch.bfloat16, device="cuda")
        return list(weight.mul_(task.k**-0.5))
    return [_matrix(task.form, task.rows, task.k) for _ in range(copies)]


def _matrix(form: tuple[str, int], n: int, k: int) -> QuantizedMatrix:
    name, group = form
    spread = 0.5 + torch.rand(n, -(-k // (group or k)), device="cuda")
    if name == "fp8":
        values = torch.randn(n, k, device="cuda").mul_(50).to(torch.float8_e4m3fn)
        rows = 128 if group else 1
        return QuantizedMatrix(name, values, spread[::rows] / (50 * k**0.5), (n, k), (rows, group or k))
    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8, device="cuda")
    if name == "int4":
        return QuantizedMatrix(name, codes, spread / (4.6 * k**0.5), (n, k), (1, group))
    if group == 32:
        exponent = 127 - torch.tensor(3 * k**0.5).log2().int() + (spread > 1)
        return QuantizedMatrix(name, codes, exponent.to(torch.uint8), (n, k), (1, group))
    row_scale = torch.full((n,), k**-0.5 / 3, device="cuda")
    return QuantizedMatrix(name, codes, spread.to(torch.float8_e4m3fn), (n, k), (1, group), row_scale=row_scale)


def _whole(model: str, hidden: int, qkv: int, o: int, intermediate: int) -> list[Task]:
    """The products of a dense model on one rank."""
    return [
        Task(f"{model}-qkv", qkv, hidden),
        Task(f"{model}-o", hidden, o),
        Task(f"{model}-gate_up", 2 * intermediate, hidden),
        Task(f"{model}-gated", intermediate, hidden, "gated"),
        Task(f"{model}-down", hidden, intermediate),
        Task(f"{model}-logits", 151936, hidden, "logits"),
        Task(f"{model}-argmax", 151936, hidden, "argmax"),
    ]


def _slices(model: str, ranks: int, hidden: int, heads: int, kv_heads: int, intermediate: int = 0) -> list[Task]:
    """One rank's of several; heads 128 wide. Without `intermediate` the feed-forward is experts."""
    name = f"{model}-tp{ranks}"
    q, kv = heads // ranks, max(kv_heads // ranks, 1)
    cut = intermediate // ranks
    dense = [Task(f"{name}-gated", cut, hidden, "gated"), Task(f"{name}-down", hidden, cut)] if cut else []
    return [
        Task(f"{name}-qkv", 128 * (q + 2 * kv), hidden),
        Task(f"{name}-o", hidden, 128 * q),
        *dense,
        Task(f"{name}-argmax", 151936 // ranks, hidden, "argmax"),
    ]


TASKS = [
    *_whole("8b", 4096, 6144, 4096, 12288),
    *_whole("0.6b", 1024, 4096, 2048, 3072),
    *(task for ranks in (2, 4, 8) for task in _slices("8b", ranks, 4096, 32, 8, 12288)),
    *(task for ranks in (2, 4, 8, 1) for task in _slices("30b", ranks, 2048, 32, 4)),
]
TOKENS = (1, 4, 16, 32, 64)

# (block_n, block_k, warps, stages): x on the left; mma, or wgmma for 64 rows.
LEFT = {
    16: [(16, 256, 2, 5), (16, 512, 2, 4), (32, 128, 4, 6), (32, 256, 4, 4), (32, 256, 4, 6), (64, 128, 4, 4),
         (64, 128, 4, 6), (64, 256, 4, 4), (64, 256, 8, 4), (128, 128, 4, 4)],
    32: [(16, 256, 2, 4), (32, 128, 4, 6), (32, 256, 4, 4), (32, 256, 4, 5), (64, 128, 4, 4), (64, 128, 4, 6),
         (64, 256, 4, 3), (128, 128, 4, 4)],
    64: [(16, 256, 4, 3), (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 4), (64, 128, 4, 3), (64, 128, 4, 5),
         (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 4, 3)],
}  # fmt: skip
# The same and whether by TMA: the weight on the left, wgmma.
RIGHT = {
    16: [(64, 128, 4, 3, False), (64, 128, 4, 5, False), (64, 128, 4, 4, True), (64, 256, 4, 3, True),
         (128, 128, 4, 4, True)],
    32: [(64, 128, 4, 3, False), (64, 128, 4, 5, False), (64, 128, 4, 4, True), (64, 256, 4, 3, True),
         (128, 128, 4, 4, True)],
    64: [(64, 128, 4, 3, False), (64, 128, 4, 4, True), (128, 64, 4, 5, True), (128, 128, 4, 3, True)],
}  # fmt: skip
# (block_n, block_k, warps, stages); stages of a loop, which is left out where the splits cover K at once.
GEMV = [
    (1, 4096, 2, 1), (2, 4096, 4, 1), (4, 4096, 4, 1), (4, 4096, 8, 1), (8, 4096, 8, 1),
    (2, 2048, 2, 1), (4, 2048, 4, 1), (8, 2048, 4, 1), (4, 2048, 4, 3),
    (2, 1024, 1, 1), (4, 1024, 2, 1), (4, 1024, 4, 1), (8, 1024, 4, 1), (16, 1024, 4, 1), (8, 1024, 4, 3),
    (8, 512, 4, 4), (16, 512, 4, 3), (16, 256, 4, 6), (32, 256, 4, 4),
]  # fmt: skip


# Rows of the matrix in a program, lines, warps, stages, and whether x is gathered.
TILES = [(64, 1, 4, 4, False), (64, 2, 4, 4, False), (64, 4, 4, 3, False), (128, 1, 4, 4, False),
         (128, 2, 4, 3, False), (128, 2, 8, 4, False), (128, 4, 8, 3, False)]  # fmt: skip
# Of one token: rows, lines, warps; without a loop where splits allow it, gathered or not.
ONCE = [(64, 2, 4), (64, 4, 4), (64, 8, 4), (128, 4, 8), (128, 8, 8), (128, 2, 4), (128, 4, 4)]


def today(task: Task, m: int, sms: int) -> Config | quantized.Config | None:
    """What is chosen now."""
    if task.form is None:
        return choose(task.n, task.k, m, torch.bfloat16, sms, task.gated)
    return quantized.choose(task.form[0], task.n, task.k, m, task.form[1], sms, task.gated)


def rows_class(task: Task, m: int) -> int:
    """Tokens that share a configuration."""
    return m if m == 1 else padded_rows(m) if task.form is None else quantized.padded_rows(m)


def candidates(task: Task, m: int, sms: int) -> list[Config] | list[quantized.Config]:
    """What is chosen today first."""
    return _plain_candidates(task, m, sms) if task.form is None else _quantized_candidates(task, m, sms)


def _quantized_candidates(task: Task, m: int, sms: int) -> list[quantized.Config]:
    """With programs for a third to five times the multiprocessors."""
    assert task.form is not None
    chosen = today(task, m, sms)
    found = [chosen] if isinstance(chosen, quantized.Config) else []
    form, group = task.form
    width = -(-task.k // (64 * quantized.codes_of(form)))
    inner = form == "int4"
    for rows, lines, warps, stages, gather in TILES:
        tile = quantized.Config(rows // (1 + task.gated), lines, 1, warps, stages, gather=gather)
        blocks = -(-task.n // tile.block_n) * -(-m // quantized.padded_rows(m))
        most = -(-width // lines) // 2
        splits = [s for s in (1, 2, 4, 8) if s <= most and sms // 2 <= blocks * s <= 5 * sms] or [1]
        found += [replace(tile, splits=s) for s in splits[-2:]]
        if inner and lines > 1:
            found.append(replace(tile, splits=splits[-1], inner=True))
    for rows, lines, warps in ONCE if m <= 16 else ():
        splits = -(-width // lines)
        if splits <= 24:
            tile = quantized.Config(rows // (1 + task.gated), lines, splits, warps, 1, inner=inner)
            found += [tile, replace(tile, gather=True)] if form != "fp8" and m == 1 else [tile]
    limit = quantized.most_lines(form, group)
    fitting = [c for c in dict.fromkeys(found) if c.fits(m, task.n, task.gated)]
    return [c for c in fitting if c.inner or c.lines <= limit]


def _plain_candidates(task: Task, m: int, sms: int) -> list[Config]:
    """At most 26."""
    rows, found = padded_rows(m), list[Config]()
    if (chosen := choose(task.n, task.k, m, torch.bfloat16, sms, task.gated)) is not None:
        found.append(chosen)
    if m == 1:
        for block_n, block_k, warps, stages in GEMV:
            if block_k > 2 * task.k:
                continue
            pieces = -(-task.k // block_k)
            if task.gated:
                block_n = max(block_n // 2, 1)
            found.append(Config(block_n, block_k, 1, warps, stages, gemv=True, ahead=1))
            if 1 < pieces <= 4 and stages == 1:
                found.append(replace(found[-1], splits=pieces))
    tiles = [Config(bn, bk, 1, w, s, ahead=4) for bn, bk, w, s in LEFT[rows]]
    tiles += [Config(bn, bk, 1, w, s, weight_first=True, tma=t, ahead=4) for bn, bk, w, s, t in RIGHT[rows]]
    if m == 1:
        tiles = tiles[2:5]
    if task.gated:
        tiles = [replace(tile, block_k=tile.block_k // 2) for tile in tiles]
    found += tiles
    split = []
    for tile in tiles:
        most = min(4, int(3.2 * sms) // -(-task.n // tile.block_n), task.k // (4 * tile.block_k))
        split += [replace(tile, splits=count) for count in sorted({2, most}) if 1 < count <= most]
    # The widest tiles gain most from a split.
    found += sorted(split, key=lambda tile: -tile.block_n)
    found += [replace(tile, ahead=ahead) for tile in tiles[1::3] for ahead in (0, 16)]
    plain = task.op != "argmax"
    fitting = [c for c in dict.fromkeys(found) if c.fits(m, task.n, task.gated) and (plain or c.splits == 1)]
    return fitting[:26]
