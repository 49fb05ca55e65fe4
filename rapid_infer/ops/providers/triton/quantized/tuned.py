"""Configurations measured on an H200 in bf16 with `benchmarks/tune_linear.py --format`."""

from __future__ import annotations

from rapid_infer.ops.providers.triton.quantized.config import Config

TUNED: dict[tuple[str, int, int, int, int, bool], Config] = {
    ("fp4", 32, 6144, 4096, 1, False): Config(64, 4, splits=8, stages=1, gather=True),
    ("fp4", 32, 6144, 4096, 32, False): Config(128, 2, splits=4, stages=3),
    ("fp4", 32, 4096, 4096, 1, False): Config(64, 4, splits=8, stages=1, gather=True),
    ("fp4", 32, 4096, 4096, 32, False): Config(64, 1, splits=8),
    ("fp4", 32, 12288, 4096, 1, True): Config(32, 8, splits=4, stages=1, gather=True),
    ("fp4", 32, 12288, 4096, 32, True): Config(64, 1, splits=2),
    ("fp4", 32, 4096, 12288, 1, False): Config(128, 8, splits=12, warps=8, stages=1, gather=True),
    ("fp4", 32, 4096, 12288, 32, False): Config(64, 1, splits=8),
    ("int4", 128, 6144, 4096, 1, False): Config(64, 8, splits=4, stages=1, gather=True, inner=True),
    ("int4", 128, 6144, 4096, 32, False): Config(128, 1, splits=4),
    ("int4", 128, 4096, 4096, 1, False): Config(128, 4, splits=8, stages=1, gather=True, inner=True),
    ("int4", 128, 4096, 4096, 32, False): Config(128, 1, splits=8),
    ("int4", 128, 12288, 4096, 1, True): Config(64, 1, splits=2),
    ("int4", 128, 12288, 4096, 32, True): Config(32, 1),
    ("int4", 128, 4096, 12288, 1, False): Config(128, 8, splits=12, warps=8, stages=1, inner=True),
    ("int4", 128, 4096, 12288, 32, False): Config(128, 1, splits=8),
    ("fp8", 0, 6144, 4096, 1, False): Config(64, 4, splits=4, stages=3),
    ("fp8", 0, 6144, 4096, 32, False): Config(64, 2, splits=4, stages=5),
    ("fp8", 0, 4096, 4096, 1, False): Config(128, 2, splits=8, warps=8),
    ("fp8", 0, 4096, 4096, 32, False): Config(128, 2, splits=8, warps=8),
    ("fp8", 0, 12288, 4096, 1, True): Config(32, 4, stages=3),
    ("fp8", 0, 12288, 4096, 32, True): Config(64, 2, splits=2, stages=3),
    ("fp8", 0, 4096, 12288, 1, False): Config(128, 2, splits=8, warps=8),
    ("fp8", 0, 4096, 12288, 32, False): Config(128, 2, splits=8, warps=8),
}
"""By form, group, outputs, inputs, 1 or the padded rows, and whether gated.

FP8 in blocks of 128 is left to the rules: with the configurations of rows it was slower, and its own were not measured.
"""
