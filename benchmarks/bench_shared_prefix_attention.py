"""Decode attention of rows that share cache blocks: a step's plan and layers, with sharing on and off."""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from functools import partial

import torch
from common import op_timing
from torch import Tensor

EXAMPLES = """\
What it does: builds the block tables of a decode step in which groups of rows begin with the same blocks, makes the
Triton attention of a step (plan and layers, each with a cache of its own) with sharing on and off, compares both, and
times them in CUDA graphs of many layers and of one: from the difference follow a layer and what the step costs once.

Read a line so: `us/layer` is one layer, `us/plan` what is there once per step. `MB` is what a layer must read, shared
blocks once; `peak` the share of --bandwidth that this would be. `diff` is the relative norm of the difference between
on and off.

examples
  on an H200, a minute:
    python benchmarks/bench_shared_prefix_attention.py
  constants of the modules may be tried:
    python benchmarks/bench_shared_prefix_attention.py --set shared.QUERIES=128
  what can be tried without a GPU, in Triton's interpreter:
    python benchmarks/bench_shared_prefix_attention.py --device cpu --quick
"""


@dataclass(frozen=True)
class Load:
    """`groups` groups of `rows` rows, each with `shared` keys in common and `low` to `high` of its own."""

    name: str
    groups: int
    rows: int
    shared: int
    low: int
    high: int


LOADS = (
    Load("256 x (2048 shared + 64..192)", 1, 256, 2048, 64, 192),
    Load("2 x 128 x (2048 shared + 64..192)", 2, 128, 2048, 64, 192),
    Load("8 x 32 x (2048 shared + 64..192)", 8, 32, 2048, 64, 192),
    Load("32 x (2048 shared + 64..192)", 1, 32, 2048, 64, 192),
    Load("4 x (2048 shared + 64..192)", 1, 4, 2048, 64, 192),
    Load("2 x (1024 shared + 64..192)", 1, 2, 1024, 64, 192),
    Load("256 x 700, nothing shared", 256, 1, 0, 700, 700),
    Load("32 x 700, nothing shared", 32, 1, 0, 700, 700),
    Load("2 x 384, nothing shared", 2, 1, 0, 384, 384),
    Load("1 x 384", 1, 1, 0, 384, 384),
)
QUICK = (Load("2 x 3 x (512 shared + 64..192)", 2, 3, 512, 64, 192), Load("3 x 100, nothing shared", 3, 1, 0, 100, 100))


def block_table(load: Load, lengths: list[int], block_size: int) -> tuple[Tensor, int]:
    """(`[rows, blocks per row]` int32, blocks) of a shuffled cache."""
    leading = load.shared // block_size
    blocks = iter((torch.randperm(sum(-(-n // block_size) for n in lengths)) + 1).tolist())
    table = torch.zeros(len(lengths), max(-(-n // block_size) for n in lengths), dtype=torch.int32)
    for row, n in enumerate(lengths):
        own = 0
        if row % load.rows:
            table[row, :leading] = table[row - 1, :leading]
            own = leading
        for column in range(own, -(-n // block_size)):
            table[row, column] = next(blocks)
    return table, sum(-(-n // block_size) for n in lengths) + 1


def measure(load: Load, heads: int, kv_heads: int, ns: argparse.Namespace) -> None:
    from rapid_infer.ops.attention_metadata import AttentionMetadata
    from rapid_infer.ops.attention_params import AttentionParams
    from rapid_infer.ops.providers.triton.attention import shared
    from rapid_infer.ops.providers.triton.attention.paged_attention import paged_attention

    torch.manual_seed(0)
    random.seed(0)
    device, dim, size = ns.device, 128, 64
    rows = load.groups * load.rows
    lengths = [load.shared + random.randint(load.low, load.high) for _ in range(rows)]
    table, blocks = block_table(load, lengths, size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # In a model the weights of a layer leave nothing of its keys in the L2 cache.
    layers = max(ns.layers, op_timing.copies_for(2 * blocks * size * kv_heads * dim * dtype.itemsize, device))
    caches = [torch.randn(2, blocks, size, kv_heads, dim, device=device, dtype=dtype) for _ in range(layers)]
    q = torch.randn(rows, heads, dim, device=device, dtype=dtype)
    row = torch.arange(rows, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    start = torch.arange(rows + 1, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(table.to(device), row, start, seq_lens, row, 1, max(lengths), rows)

    params = AttentionParams(dim**-0.5)

    def step(first: int, end: int) -> Tensor:
        metadata.plans.clear()
        for k, v in caches[first:end]:
            out = paged_attention(q, k, v, metadata, params)
        assert isinstance(out, Tensor)
        return out

    keys = sum(n if i % load.rows == 0 else n - load.shared for i, n in enumerate(lengths))
    needed = keys * 2 * kv_heads * dim * dtype.itemsize
    outs = {}
    for sharing in (False, True):
        shared.SHARING = sharing
        outs[sharing] = step(0, layers)
        one, many = (
            op_timing.time_calls(calls, device, ns.repeats).seconds * 1e6
            for calls in ([partial(step, i, i + 1) for i in range(layers)], [partial(step, 0, layers)])
        )
        layer = (many - one) / (layers - 1)
        speed = needed / max(layer, 1e-9) * 1e6
        diff = op_timing.difference(outs[True], outs[False]) if sharing else 0.0
        label = f"{load.name:<36} {heads:>2}/{kv_heads:<2} {'on' if sharing else 'off':<4}"
        share = speed / ns.bandwidth / 1e12
        print(f"{label} {layer:>9.2f} {one - layer:>8.2f} {needed / 1e6:>8.1f} {share:>6.1%} {diff:>8.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=12, help="at least 2")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s")
    parser.add_argument("--quick", action="store_true", help="two small steps of two layers")
    parser.add_argument("--set", action="append", default=[], metavar="MODULE.NAME=VALUE", help="a module's constant")
    ns = parser.parse_args()
    if ns.device == "cpu":
        from rapid_infer.testing.interpreter import interpret_triton

        interpret_triton()
    elif not torch.cuda.is_available():
        sys.exit("needs a GPU, or --device cpu --quick")
    from rapid_infer.ops.providers.triton.attention import decode, groups, plan, shared

    modules = {m.__name__.split(".")[-1]: m for m in (decode, groups, plan, shared)}
    for setting in ns.set:
        name, value = setting.split("=")
        module, constant = name.split(".")
        if not hasattr(modules[module], constant):
            sys.exit(f"{module} has no {constant}")
        setattr(modules[module], constant, int(value))
    loads, shapes = LOADS, ((32, 8), (16, 8))
    if ns.quick:
        loads, shapes, ns.layers, ns.repeats = QUICK, ((4, 2),), 2, 1
        groups.MIN_SAVED = 1
    print(
        f"{'step':<36} {'heads':<5} {'share':<5} {'us/layer':>8} {'us/plan':>8} {'MB':>8} {'peak':>6} {'diff':>8}",
        flush=True,
    )
    for heads, kv_heads in shapes:
        for load in loads:
            measure(load, heads, kv_heads, ns)


if __name__ == "__main__":
    main()
