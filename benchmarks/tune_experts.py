"""Times the Triton experts in many shapes of tile, for the mixtures of experts of data/workloads.json, on this GPU."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import op_timing, workloads
from torch import Tensor

from rapid_infer.ops.providers.triton.experts import fused_experts as module
from rapid_infer.ops.providers.triton.experts.fused_experts import TILES, Tile, choices_per_tile, fused_experts

EXAMPLES = """\
What it does: for each model and number of tokens, whose experts are a uniform random draw, times all four kernels of
the experts of a layer with every candidate for gate and up, then with every candidate for down, the other part staying
as it is today. Weights are cold. Prints microseconds, TB/s of the weights of the experts touched and TFLOP/s, the
fastest first; "now" is what runs today.

examples
  everything, under two minutes on an H200 with 16 cores:
    python benchmarks/tune_experts.py --output results/experts.json
  prompts only:
    python benchmarks/tune_experts.py --model qwen3-30b-a3b --tokens 8192
"""
MODELS = {"deepseek-v2-lite": "n_routed_experts", "qwen3-30b-a3b": "num_experts"}


@dataclass(frozen=True)
class Layer:
    experts: int
    top_k: int
    hidden: int
    size: int

    @classmethod
    def of(cls, model: str) -> Layer:
        config = workloads.spec()["models"][model]
        return cls(
            config[MODELS[model]], config["num_experts_per_tok"], config["hidden_size"], config["moe_intermediate_size"]
        )

    def weights(self) -> tuple[Tensor, Tensor]:
        def rand(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=shape[-1] ** -0.5)

        return rand(self.experts, 2 * self.size, self.hidden), rand(self.experts, self.hidden, self.size)

    def tokens(self, n: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        weights, slots = torch.rand(n, self.experts, device="cuda").topk(self.top_k, dim=-1)
        x = torch.randn(n, self.hidden, dtype=torch.bfloat16, device="cuda")
        return {"x": x, "weights": weights, "slots": slots.int()}

    def flops(self, n: int) -> int:
        return 2 * n * self.top_k * 3 * self.size * self.hidden


def candidates(now: Tile, few: bool) -> list[tuple[str, Tile]]:
    """`now` with another `up` or `down`, and with what both have in common changed; `few` choices are in a tile."""
    shapes = [
        (n, k) for n in ((16, 32, 64, 128) if few else (64, 128, 256)) for k in ((64, 128, 256) if few else (64,))
    ]
    found = [("up", replace(now, up=shape)) for shape in shapes if shape != now.up]
    found += [("down", replace(now, down=shape)) for shape in shapes if shape != now.down]
    found += [("both", replace(now, stages=n)) for n in (2, 3, 4, 5) if n != now.stages]
    found += [("both", replace(now, warps=n)) for n in (4, 8) if n != now.warps]
    if not few:
        found += [("both", Tile(up=(64, 64), down=(128, 64), warps=4, stages=n)) for n in (3, 4)]
        found += [("both", Tile(up=(128, 64), down=(128, 64), warps=8, stages=4))]
        found += [("both", Tile((128, 64), (n, 64), 8, stages, tma=True)) for n in (128, 256) for stages in (3, 4)]
    return [(part, tile) for part, tile in found if tile != now]


def compile_one(job: tuple[Layer, int, Tile]) -> tuple[tuple[Layer, int, Tile], str | None]:
    """Run once, which leaves the kernels in Triton's cache on disk."""
    layer, n, tile = job
    try:
        use(layer, n, tile)
        fused_experts(**layer.tokens(n), gate_up=layer.weights()[0], down=layer.weights()[1], shared=None)
        torch.cuda.synchronize()
    except Exception as error:
        return job, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    return job, None


def use(layer: Layer, n: int, tile: Tile) -> None:
    if n == 1:
        module.ALONE = tile
    else:
        TILES[per_tile(layer, n)] = tile


def today(layer: Layer, n: int) -> Tile:
    return module.ALONE if n == 1 else TILES[per_tile(layer, n)]


def per_tile(layer: Layer, n: int) -> int:
    return choices_per_tile(n * layer.top_k, layer.experts)


def measure(name: str, layer: Layer, n: int, tiles: list[tuple[str, Tile]], failed: dict[Any, str]) -> dict[str, Any]:
    inputs = layer.tokens(n)
    copies = [layer.weights() for _ in range(2 if n == 1 else 1)]
    now = today(layer, n)
    touched = len(inputs["slots"].unique()) * 6 * layer.size * layer.hidden
    expected: Tensor | None = None
    rows: list[dict[str, Any]] = []
    print(f"{name}, {n} tokens, {per_tile(layer, n)} choices a tile", flush=True)
    for part, tile in [("now", now), *tiles]:
        row: dict[str, Any] = {"part": part, "tile": asdict(tile)}
        rows.append(row)
        if (error := failed.get((layer, n, tile))) is None:
            use(layer, n, tile)
            out = fused_experts(**inputs, gate_up=copies[0][0], down=copies[0][1], shared=None)
            expected = out if expected is None else expected
            if (diff := op_timing.difference(out, expected)) > 1e-2:
                error = f"off by {diff:.2g}"
        if error is not None:
            row["error"] = error
            continue
        calls = [partial(fused_experts, **inputs, gate_up=up, down=down, shared=None) for up, down in copies]
        row["us"] = op_timing.time_calls(calls, "cuda", 5).seconds * 1e6
    use(layer, n, now)
    for row in sorted(rows, key=lambda row: row.get("us", float("inf"))):
        if "us" in row:
            us, speed = row["us"], f"{row['us']:9.1f} us"
            speed += f" {touched / us / 1e6:5.2f} TB/s {layer.flops(n) / us / 1e6:6.0f} TFLOP/s"
        else:
            speed = f"failed: {row['error']}"
        print(f"  {row['part']:>5} {speed}  {Tile(**row['tile'])}", flush=True)
    return {"model": name, "tokens": n, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--tokens", action="append", type=int, help="default: 1, 32, 256 and 8192")
    parser.add_argument("--processes", type=int, default=12, help="to compile in")
    parser.add_argument("--output", type=Path, help="a JSON file for all figures")
    ns = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    cases = [(name, Layer.of(name), n) for name in ns.model or MODELS for n in ns.tokens or (1, 32, 256, 8192)]
    tried = {(name, n): candidates(today(layer, n), per_tile(layer, n) <= 32) for name, layer, n in cases}
    jobs = list(dict.fromkeys((layer, n, tile) for name, layer, n in cases for _, tile in tried[name, n]))
    with multiprocessing.get_context("spawn").Pool(ns.processes) as pool:
        failed = {job: error for job, error in pool.imap_unordered(compile_one, jobs) if error is not None}
    found = [measure(name, layer, n, tried[name, n], failed) for name, layer, n in cases]
    if ns.output:
        ns.output.parent.mkdir(parents=True, exist_ok=True)
        ns.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
